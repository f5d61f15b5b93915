"""Peak memory of the ranks of a pipeline, from the traced moments of a step of the whole model.

At each moment of its passes, a stage holds the memory of the whole model minus the tensors saved by the layers before
the stage. In addition, torch's pipeline runtime (`torch.distributed.pipelining`) keeps

- the outputs of a stage until their backward pass has ended: results for the next stage, or the model's outputs;
- a buffer for each message that a stage receives in a pass: all inputs, and all gradients of outputs;
- messages while they are sent. Ranks on CPUs keep them longer: to the end of the step, unless the schedule waits for
  each message;
- if the backward pass is split: what `analytic.memory.split_stages` describes. The first stage has no pass for inputs.

From a stage's first backward pass on, all its parameters have full gradients; with ZeRO 1, they have them throughout.
For ZeRO 2 and 3, see `analytic.memory.sharded_stages`.

The memory of a stage is known only if the trace separates the memory of its layers. It does not if layers in the middle
of the model share parameters, if layers need no backward pass because neither their inputs nor their parameters need a
gradient, or if a stage begins between two layers without parameters.

Predicted peaks of transformers and stacks of layers are at most 1.5 % below those that torch's CPU allocator records on
the ranks of a run, and at most 3.5 % above; 9 % with full recomputation in a split backward pass
(tests/training/memory/test_stages.py). Stages that begin at or after a layer that saves its own output, such as a ReLU,
need up to one message more than that, and more if their backward pass is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isnan, nan
from typing import NamedTuple

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.running import RankPeak, StageMemory, rank_peak
from shardscope.analytic.memory.sharded_stages import Alive, ShardedStages, states_of
from shardscope.analytic.memory.split_stages import StageEnd, split_stage
from shardscope.analytic.schedules.table import ScheduleTable
from shardscope.spec.model.step import Moment, PipelinePiece, StepTrace


class _Layers(NamedTuple):
    """Memory and units of each pipeline piece (a layer of the model), from the moments of a traced step."""

    forward: list[float]
    """Bytes held by the layers before each piece at the start of its forward pass, for one sample; NaN for a piece
    without units after another one, because the trace does not separate their memory."""
    backward: list[float]
    """Same as `forward`, but in the backward pass, when autocast's copies of weights for the forward pass are freed."""
    piece_of: list[int]
    """Index of the piece that each unit belongs to; 0 for unit 0."""
    gradients: list[int]
    """Bytes of gradients of the units of each piece, without unit 0."""
    tied: list[tuple[int, list[int]]]
    """For each parameter used by several pieces: bytes of its gradient, and these pieces."""


def pipeline_peaks(
    step: JobStep,
    table: ScheduleTable,
    split: Sequence[int],
    *,
    passes: int,
    sharded: ShardedStages | None = None,
    keeps_gradients: bool = False,
) -> list[RankPeak] | None:
    """Return the peak of each rank; None if the trace does not separate the memory of each layer.

    Args:
        step: A step of a job.
        table: The schedule of one pass.
        split: Number of pipeline pieces in each stage.
        passes: Number of passes in a step. Gradients of the first pass exist during all later passes.
        sharded: How stages are sharded; None if they are whole.
        keeps_gradients: Whether whole gradients are in buckets that exist throughout the step.
    """
    layers = _layers(step.trace, step.job.recompute, step.element_bytes)
    if layers is None or any(isnan(layers.forward[end]) for end in accumulate(split[:-1])):
        return None
    stages = _stages(step, layers, table, split, sharded)
    return [
        rank_peak(
            step, table, rank, {place: stages[place] for place, at in enumerate(table.stage_ranks) if at == rank},
            passes=passes, keeps_gradients=keeps_gradients,
        )
        for rank in range(step.world_size)
    ]  # fmt: skip


def _layers(trace: StepTrace, mode: str, width: int) -> _Layers | None:
    """Return the layers; None unless pieces consist of whole units or of none, with unit 0's parameters at the ends."""
    enter, turn, leave = (
        {row.unit: row.activations for row in trace.moments[mode] if row.phase == phase and row.unit}
        for phase in ("enter", "turn", "leave")
    )
    forward, backward, piece_of = [0.0], [0.0], [0]
    for place, piece in enumerate(trace.pieces):
        units = sorted({trace.parameters[index].unit for index in piece.parameters} - {0})
        last = len(piece_of) - 1
        if any(
            unit != last + n or unit not in enter.keys() & leave.keys() for n, unit in enumerate(units, 1)
        ):
            return None
        if place and units:
            forward.append(enter[units[0]])
            backward.append(leave[units[0]])
        elif place:
            if piece.parameters and place < len(trace.pieces) - 1:  # those of unit 0
                return None
            is_known = piece_of[last] == place - 1 and last in turn
            forward.append(turn[last] + enter[last] - leave[last] if is_known else nan)
            backward.append(turn[last] if is_known else nan)
        piece_of += [place] * len(units)
    if len(piece_of) < len(trace.units):
        return None
    gradients, users = [0] * len(trace.pieces), dict[int, list[int]]()
    for row in trace.parameters:
        gradients[piece_of[row.unit]] += width * row.num_elements * (row.is_trained and row.unit > 0)
    for place, piece in enumerate(trace.pieces):
        for index in piece.parameters:
            users.setdefault(index, []).append(place)
    rows = trace.parameters
    tied = [
        (width * rows[index].num_elements, places)
        for index, places in users.items()
        if len(places) > 1 and rows[index].is_trained
    ]
    return _Layers(forward, backward, piece_of, gradients, tied)


def _stages(
    step: JobStep,
    layers: _Layers,
    table: ScheduleTable,
    split: Sequence[int],
    sharded: ShardedStages | None,
) -> list[StageMemory]:
    trace, mode, samples = step.trace, step.job.recompute, step.samples
    pieces, ends, ranks = trace.pieces, [*accumulate(split)], table.stage_ranks
    rows = _by_piece(trace, mode, layers)
    at_head = max(row.around for _, row in rows if row.phase == "backward" and not row.done)
    bounds = [*zip([0, *ends], ends, strict=False)]
    own = [{index for piece in pieces[start:end] for index in piece.parameters} for start, end in bounds]
    found = []
    for stage, (start, end) in enumerate(bounds):
        is_last = end == len(pieces)
        output = trace.output_bytes if is_last else pieces[end - 1].output_bytes
        inputs = pieces[start - 1].output_bytes if start else 0.0
        mates = [each for each, rank in zip(own, ranks, strict=True) if rank == ranks[stage]]
        shared = {place for place in own[stage] if sum(place in each for each in mates) > 1}
        states = states_of(trace, pieces[start:end], shared, sharded, step.element_bytes)
        below = layers.backward[start]
        forward, first, later = 0.0, Alive(), Alive()
        for place, row in rows:
            if not start <= place < end:
                continue
            gathered = states.gathered_at(row, place - start)
            if row.phase in ("enter", "forward"):
                forward = max(forward, samples * (row.activations - layers.forward[start]) + gathered)
                continue
            now = samples * (row.activations - below + output * is_last)
            new, done = _gradients(layers, place, row, start, end)
            around = row.around if is_last else max(0.0, row.around - at_head)
            first = max(first, Alive(now + gathered, new + done + around), key=sum)
            left = 0.0 if sharded is None else done + max(0.0, around - states.whole_around)
            later = max(later, Alive(now + gathered, new + left), key=sum)
        saved, last = _saved(trace, mode, layers, start, end), StageEnd()
        if is_last:
            at_loss = _at_loss(trace, mode) - below + output
            first, later = (max(each, Alive(samples * at_loss), key=sum) for each in (first, later))
            last = StageEnd(output, trace.loss_bytes, max(0.0, at_loss - saved))
        is_split = start > 0 and any(op.op == "W" for op in table.ops)
        passes = None if not is_split else split_stage(
            pieces[start:end], [_gradients_of(step, piece) for piece in pieces[start:end]], mode, last,
            samples=samples, saved=samples * saved, is_sharded=sharded is not None,
        )  # fmt: skip
        is_sent = not is_last and ranks[stage + 1] != ranks[stage]
        found.append(
            StageMemory(
                states, saved=samples * saved, forward=forward, first=first, later=later, split=passes,
                inputs=samples * inputs, received=samples * (inputs + output * (not is_last)),
                output=samples * output * is_sent, handed_on=samples * output * (not is_last and not is_sent),
                answer=samples * inputs * (start > 0 and ranks[stage - 1] != ranks[stage]),
            )
        )  # fmt: skip
    return found


def _gradients_of(step: JobStep, piece: PipelinePiece) -> float:
    """Return the bytes of the gradients of a piece's parameters."""
    rows = (step.trace.parameters[place] for place in piece.parameters)
    return step.element_bytes * sum(row.num_elements for row in rows if row.is_trained)


def _saved(trace: StepTrace, mode: str, layers: _Layers, start: int, end: int) -> float:
    """Return the bytes that the pieces from `start` to `end` save for one sample, including their output."""
    is_last = end == len(trace.pieces)
    top = _after_loss(trace, mode) + trace.loss_bytes if is_last else layers.backward[end]
    return top - layers.backward[start]


def _after_loss(trace: StepTrace, mode: str) -> float:
    """Return the bytes, for one sample, as the backward pass of the loss ends.

    That is where the backward pass of the whole model begins, or of its last unit if that computes the output itself.
    """
    turns = [row for row in trace.moments[mode] if row.phase == "turn"]
    return max((row.activations for row in turns if not row.unit), default=turns[0].activations)


def _by_piece(trace: StepTrace, mode: str, layers: _Layers) -> list[tuple[int, Moment]]:
    """Return the moments of the passes with the piece that runs at each, without the moments of the loss."""
    last, found = len(trace.units) - 1, []
    for row in trace.moments[mode]:
        if row.phase == "loss":
            continue
        forward = row.phase in ("enter", "forward")
        if row.unit:
            place = layers.piece_of[row.unit]
        elif row.done in (0, last):
            place = 0 if (row.done == 0) is forward else len(trace.pieces) - 1
        else:
            before = row.done if forward else last - row.done
            place, after = layers.piece_of[before : before + 2]
            if after > place + 1:  # pieces without units run
                place += 1
            elif not forward:
                place = after
        found.append((place, row))
    return found


def _gradients(layers: _Layers, place: int, row: Moment, start: int, end: int) -> tuple[float, float]:
    """Return the bytes of a stage's arriving gradients and of its finished gradients at a moment, without unit 0.

    The gradient of a parameter used by several pieces is summed at the first of these pieces in the whole model, but in
    a pipeline at the first in each stage.
    """
    new, done = row.arriving, row.own + sum(layers.gradients[place + 1 : end])
    for size, users in layers.tied:
        if start <= users[0] and users[-1] < end:
            continue
        if users[0] <= place < users[-1]:
            new -= size
            done += size * any(place < user < end for user in users)
        if place == users[0]:
            new = min(new, size)
    return max(new, 0.0), done


def _at_loss(trace: StepTrace, mode: str) -> float:
    """Return the maximum bytes during the loss, for one sample.

    The bytes that the loss adds to the model's saved tensors are taken from the trace without recomputation.
    """
    at_loss = max(row.activations for row in trace.moments["none"] if row.phase == "loss")
    return _after_loss(trace, mode) + at_loss - _after_loss(trace, "none")
