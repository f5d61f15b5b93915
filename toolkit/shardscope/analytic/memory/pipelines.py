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

Unless the blocks of a transformer are the units of the trace, the model is traced with each layer as a unit; and a
second time if its first layers are frozen or have no parameters, because a stage's inputs require a gradient. If no
gradient flows through one of them, such as after a `detach`, the memory of stages is not predicted.

Predicted peaks without a split backward pass are within 0.1 % of those that torch's CPU allocator records on the ranks
of a run; with recomputation, whose random states are not predicted, up to 1.6 % below. With autocast they are up to
1.5 % below and 3.5 % above. With a split backward pass, ranks may keep up to six messages less than predicted
(tests/training/memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.running import RankPeak, StageMemory, rank_peak
from shardscope.analytic.memory.sharded_stages import Alive, ShardedStages, StageStates, states_of
from shardscope.analytic.memory.split_stages import StageEnd, split_stage
from shardscope.analytic.schedules.table import ScheduleTable
from shardscope.spec.model.step import Moment, PipelinePiece, StepTrace


class _Layers(NamedTuple):
    """Memory of each pipeline piece (a layer of the model), from the moments of a traced step; bytes of one sample."""

    rows: list[tuple[int, Moment]]
    """The moments of the passes with the piece that runs at each, without the moments of the loss."""
    at_start: list[float]
    """Bytes at the start of each piece's forward pass."""
    taken: list[float]
    """Bytes of each piece's input, the part of `at_start` that a stage gets in a message."""
    kept: list[float]
    """The same if the piece, or the one before it, saves its input; else 0."""
    below: list[float]
    """Bytes that the pieces before each one save for the backward pass, without its input. Autocast's copies of weights
    for the forward pass have been freed."""
    after_loss: float
    """Bytes as the backward pass of the loss ends, with the gradient of the model's output."""
    gradients: list[int]
    """Bytes of gradients of the units of each piece, without unit 0."""
    users: dict[int, list[int]]
    """The pieces that use each parameter."""


def pipeline_peaks(
    step: JobStep,
    table: ScheduleTable,
    split: Sequence[int],
    *,
    passes: int,
    sharded: ShardedStages | None = None,
    keeps_gradients: bool = False,
    exchanged: Sequence[float] = (),
) -> list[RankPeak] | None:
    """Return the peak of each rank; None if no gradient flows through one of the layers, such as after a `detach`.

    Args:
        step: A step of a job.
        table: The schedule of one pass.
        split: Number of pipeline pieces in each stage.
        passes: Number of passes in a step. Gradients of the first pass exist during all later passes.
        sharded: How stages are sharded; None if they are whole.
        keeps_gradients: Whether whole gradients are in buckets that exist throughout the step.
        exchanged: Bytes of the copy of gradients that each rank exchanges after all passes; empty if there is none.
    """
    if (stages := _stages(step, table, split, sharded)) is None:
        return None
    return [
        rank_peak(
            step, table, rank, {place: stages[place] for place, at in enumerate(table.stage_ranks) if at == rank},
            passes=passes, keeps_gradients=keeps_gradients, exchanged=exchanged[rank] if exchanged else 0.0,
        )
        for rank in range(step.world_size)
    ]  # fmt: skip


def _layers(step: JobStep, *, takes_batch: bool) -> _Layers | None:
    """Return the layers; None if no gradient flows through one of them.

    Args:
        step: A step of a job.
        takes_batch: Whether they are those of the first stage, whose input requires no gradient.
    """
    trace, mode, width = step.trace, step.job.recompute, step.element_bytes
    moments, piece_of = trace.moments[mode], trace.pieces_of_units(mode)
    flows = not takes_batch and mode in trace.flowing_moments
    if mode in trace.layer_moments:
        moments = (trace.flowing_moments if flows else trace.layer_moments)[mode]
        piece_of = [0, *range(len(trace.pieces))]
    assert piece_of is not None
    enter, turn, leave = (
        {row.unit: row for row in moments if row.phase == phase and row.unit}
        for phase in ("enter", "turn", "leave")
    )
    at_start, taken, kept, below = [0.0], [0.0], [0.0], [0.0]
    for place in range(1, len(trace.pieces)):
        gradient, last = trace.pieces[place - 1].output_bytes, len(piece_of) - 1
        if place in piece_of[1:]:
            unit = piece_of.index(place, 1)
            at_start.append(enter[unit].activations)
            taken.append(enter[unit].inputs)
            is_saved = flows or place > trace.first_trained
            if is_saved and unit not in turn.keys() & leave.keys():
                return None
            kept.append(turn[unit].inputs if is_saved else 0.0)
            below.append(leave[unit].activations - leave[unit].inputs - gradient if is_saved else 0.0)
        else:  # the parameters of a transformer's head are those of unit 0
            at_start.append(turn[last].activations + enter[last].activations - leave[last].activations)
            taken.append(gradient)
            kept.append(gradient)
            below.append(turn[last].activations - gradient)
    gradients, users = [0] * len(trace.pieces), dict[int, list[int]]()
    for place, piece in enumerate(trace.pieces):
        for index in piece.parameters:
            users.setdefault(index, []).append(place)
    for index, places in users.items():
        row = trace.parameters[index]
        is_counted = mode in trace.layer_moments or row.unit > 0
        gradients[places[0]] += width * row.num_elements * (row.is_trained and is_counted)
    turns = [row for row in moments if row.phase == "turn"]
    return _Layers(
        _by_piece(moments, piece_of, len(trace.pieces)), at_start, taken, kept, below,
        max((row.activations for row in turns if not row.unit), default=turns[0].activations),
        gradients, users,
    )  # fmt: skip


def _stages(
    step: JobStep, table: ScheduleTable, split: Sequence[int], sharded: ShardedStages | None
) -> list[StageMemory] | None:
    trace, mode, samples = step.trace, step.job.recompute, step.samples
    pieces, ends, ranks = trace.pieces, [*accumulate(split)], table.stage_ranks
    bounds = [*zip([0, *ends], ends, strict=False)]
    own = [{index for piece in pieces[start:end] for index in piece.parameters} for start, end in bounds]
    found = []
    for stage, (start, end) in enumerate(bounds):
        if (layers := _layers(step, takes_batch=not start)) is None:
            return None
        is_last = end == len(pieces)
        output = trace.output_bytes if is_last else pieces[end - 1].output_bytes
        inputs = pieces[start - 1].output_bytes if start else 0.0
        mates = [each for each, rank in zip(own, ranks, strict=True) if rank == ranks[stage]]
        shared = {place for place in own[stage] if sum(place in each for each in mates) > 1}
        states = states_of(trace, pieces[start:end], shared, sharded, step.element_bytes)
        below = layers.below[start] + layers.kept[start]
        forward, first, later = 0.0, Alive(), Alive()
        ended = (row.around for _, row in layers.rows if row.phase == "backward" and not row.done)
        at_head = max(ended, default=0.0)  # 0 if the last layers have no backward pass of their own
        for place, row in layers.rows:
            if not start <= place < end:
                continue
            gathered = states.gathered_at(row, place - start)
            if row.phase in ("enter", "forward"):
                before = layers.at_start[start]
                before += (layers.kept[start] - layers.taken[start]) * (place > start)
                forward = max(forward, samples * (row.activations - before) + gathered)
                continue
            freed = 0.0 if is_last or place < end - 1 else row.outputs
            now = samples * (row.activations - freed + output - below)
            new, done, whole = _gradients(step, layers, states, row, place=place, bounds=(start, end))
            around = row.around if is_last else max(0.0, row.around - at_head)
            first = max(first, Alive(now + gathered, new + done + around), key=sum)
            left = 0.0 if sharded is None else done - whole + max(0.0, around - states.whole_around)
            later = max(later, Alive(now + gathered, new + left), key=sum)
        top = layers.after_loss + trace.loss_bytes if is_last else layers.below[end] + output
        saved, last = top - below, StageEnd()
        if is_last:
            at_loss = _at_loss(trace, layers.after_loss) - below + output
            first, later = (max(each, Alive(samples * at_loss), key=sum) for each in (first, later))
            last = StageEnd(output, trace.loss_bytes, max(0.0, at_loss - saved))
        is_split = start > 0 and any(op.op == "W" for op in table.ops)
        passes = None if not is_split else split_stage(
            pieces[start:end], [_gradients_of(step, piece) for piece in pieces[start:end]], mode, last,
            samples=samples, saved=samples * saved, is_sharded=sharded is not None,
            tied=[
                (size, inside)
                for index, users in layers.users.items()
                if len(inside := [user - start for user in users if start <= user < end]) > 1
                if (size := _gradient_of(step, index))
            ],
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
    return sum(_gradient_of(step, place) for place in piece.parameters)


def _gradient_of(step: JobStep, place: int) -> float:
    """Return the bytes of a parameter's gradient; 0 if it is frozen."""
    row = step.trace.parameters[place]
    return float(step.element_bytes * row.num_elements * row.is_trained)


def _by_piece(
    moments: Sequence[Moment], piece_of: Sequence[int], num_pieces: int
) -> list[tuple[int, Moment]]:
    """Return the moments of the passes with the piece that runs at each, without the moments of the loss."""
    last, found = len(piece_of) - 1, []
    for row in moments:
        if row.phase == "loss":
            continue
        forward = row.phase in ("enter", "forward")
        if row.unit:
            place = piece_of[row.unit]
        elif row.done in (0, last):
            place = 0 if (row.done == 0) is forward else num_pieces - 1
        else:
            place = piece_of[row.done] if forward else piece_of[last - row.done + 1]
        found.append((place, row))
    return found


def _gradients(
    step: JobStep, layers: _Layers, states: StageStates, row: Moment, *, place: int, bounds: tuple[int, int]
) -> tuple[float, float, float]:
    """Return the bytes of a stage's arriving gradients and of its finished gradients at a moment, without unit 0; and
    the part of the latter that is not reduced.

    The gradient of a parameter used by several pieces is summed at the first of these pieces in the whole model, but in
    a pipeline at the first in each stage.
    """
    start, end = bounds
    new, done, whole = row.arriving, row.own + sum(layers.gradients[place + 1 : end]), 0.0
    for index, users in layers.users.items():
        size = step.element_bytes * step.trace.parameters[index].num_elements
        is_done = any(place < user < end for user in users)
        whole += states.whole.get(index, 0.0) * is_done
        if len(users) == 1 or not step.trace.parameters[index].is_trained:
            continue
        if start <= users[0] and users[-1] < end:
            continue
        if users[0] <= place < users[-1]:
            new -= size
            done += size * is_done
        if place == users[0]:
            new = min(new, size)
    return max(new, 0.0), done, whole


def _at_loss(trace: StepTrace, after_loss: float) -> float:
    """Return the maximum bytes during the loss, for one sample.

    The bytes that the loss adds to the model's saved tensors are taken from the trace without recomputation.
    """
    rows = trace.moments["none"]
    turns = [row for row in rows if row.phase == "turn"]
    at_end = max((row.activations for row in turns if not row.unit), default=turns[0].activations)
    return after_loss + max(row.activations for row in rows if row.phase == "loss") - at_end
