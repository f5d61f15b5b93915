"""Peak memory of the ranks of a pipeline, from the traced moments of a step of the whole model.

At each moment of its passes, a stage holds the memory of the whole model minus the tensors saved by the layers before
the stage. In addition, torch's pipeline runtime (`torch.distributed.pipelining`) keeps

- the outputs of a stage until their backward pass has ended: results for the next stage, or the model's outputs;
- a buffer for each message that a stage receives in a pass: all inputs, and all gradients of outputs;
- messages while they are sent. Ranks on CPUs keep them longer: to the end of the step, unless the schedule waits for
  each message;
- if the backward pass is split into gradients of inputs and of weights: all saved tensors of a stage, and the output
  gradients of operations with weights, from the first part to the end of the second. The first stage has no first
  part.

From a stage's first backward pass on, all its parameters have full gradients. With ZeRO 2 and 3, a rank has these only
from a backward pass to the reduction at its end, which leaves shards. It also has gathered parameters: of all its
stages with ZeRO 2; with ZeRO 3, of the running unit and, in a backward pass, of those that have run before.

Predicted peaks are within 2 % of those that torch's CPU allocator records on the ranks of a run, and within 1 % without
recomputation (tests/training/memory/test_stages.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.in_flight import recomputed_in_halves
from shardscope.analytic.schedules.table import ScheduledOp, ScheduleTable
from shardscope.analytic.sharding import padded_elements
from shardscope.spec.model.step import Moment, StepTrace


class RankPeak(NamedTuple):
    """Bytes at a rank's peak of memory that varies within a step, and of messages."""

    activations: float
    """Activations and, with ZeRO 2 and 3, gathered parameters."""
    gradients: float
    messages: float
    """Buffers of received messages, and messages that are being sent."""


class _Layers(NamedTuple):
    """Memory and units of each pipeline piece (a layer of the model), from the moments of a traced step."""

    forward: list[float]
    """Bytes held by the layers before each piece at the start of its forward pass, for one sample."""
    backward: list[float]
    """Same as `forward`, but in the backward pass, when autocast's copies of weights for the forward pass are freed."""
    piece_of: list[int]
    """Index of the piece that each unit belongs to; 0 for unit 0."""
    gradients: list[int]
    """Bytes of gradients of the units of each piece, without unit 0."""
    tied: list[tuple[int, list[int]]]
    """For each parameter used by several pieces: bytes of its gradient, and these pieces."""


class _Stage(NamedTuple):
    """Bytes of one micro-batch on one stage, and of its gradients."""

    saved: float
    """Activations saved from the forward to the backward pass, including the stage's output but not its input."""
    forward: float
    """Activations at the peak of the forward pass."""
    backward: float
    """Activations at the peak of a backward pass, if gradients of an earlier backward pass exist."""
    arriving: float
    """Gradients at the moment of `backward` that are not yet added to those of the earlier backward pass."""
    first: tuple[float, float]
    """Activations and gradients at the peak of the first backward pass."""
    gradients: float
    """All gradients of the stage."""
    gathered: float
    """All parameters of the stage that are gathered."""
    delayed: float
    """Output gradients of operations that a split backward pass keeps for its second part."""
    kept_again: float
    """Recomputed activations that the first half of a split backward pass keeps for the second."""
    again: float
    """Recomputed activations at the end of the second half."""
    received: float
    """The stage's input and the gradient of its output."""
    output: float
    """Output of the stage if it is sent to another rank, else 0."""
    answer: float
    """Gradient of the stage's input if it is sent to another rank, else 0."""


class ShardedStages(NamedTuple):
    """How ZeRO 2 or 3 shards the stages of a pipeline."""

    stage: int
    """ZeRO stage, 2 or 3."""
    ranks: int
    """Number of ranks over which a stage is sharded."""
    gradients: Sequence[float]
    """Bytes of the shards of gradients on each rank of the pipeline."""


def pipeline_peaks(
    step: JobStep,
    table: ScheduleTable,
    split: Sequence[int],
    *,
    passes: int,
    sharded: ShardedStages | None = None,
) -> list[RankPeak] | None:
    """Return the peak of each rank; None if the trace does not separate the memory of each layer.

    Args:
        step: A step of a job.
        table: The schedule of one pass.
        split: Number of pipeline pieces in each stage.
        passes: Number of passes in a step. Gradients of the first pass exist during all later passes.
        sharded: How stages are sharded; None if they are whole.
    """
    layers = _layers(step.trace, step.job.recompute, step.element_bytes)
    if layers is None:
        return None
    stages = _stages(step, layers, table.stage_ranks, split, sharded)
    return [_rank_peak(step, table, rank, stages, sharded, passes=passes) for rank in range(step.world_size)]


def _layers(trace: StepTrace, mode: str, width: int) -> _Layers | None:
    """Return the layers; None unless pieces consist of whole units, with unit 0 at the ends of the model only."""
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
            if place < len(trace.pieces) - 1 or last not in turn:
                return None
            forward.append(turn[last] + enter[last] - leave[last])
            backward.append(turn[last])
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
    ranks: Sequence[int],
    split: Sequence[int],
    sharded: ShardedStages | None,
) -> list[_Stage]:
    trace, mode, samples, width = step.trace, step.job.recompute, step.samples, step.element_bytes
    pieces, ends = trace.pieces, [*accumulate(split)]
    rows = _by_piece(trace, mode, layers)
    at_head = max(row.around for _, row in rows if row.phase == "backward" and not row.done)
    found = []
    for stage, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        is_last = end == len(pieces)
        output = trace.output_bytes if is_last else pieces[end - 1].output_bytes
        inputs = pieces[start - 1].output_bytes if start else 0.0
        own = {index for piece in pieces[start:end] for index in piece.parameters}
        gradients = width * sum(
            trace.parameters[index].num_elements
            for index in own
            if trace.parameters[index].is_trained and not (sharded and trace.parameters[index].is_whole)
        )
        units = {} if sharded is None else _gathered_units(trace, own, sharded.ranks, width)
        frees = sharded is not None and sharded.stage == 3
        below = layers.backward[start]
        forward = backward = arriving = 0.0
        first = (0.0, 0.0)
        for place, row in rows:
            if not start <= place < end:
                continue
            gathered = _gathered_at(row, units, len(trace.units) - 1) * frees
            if row.phase in ("enter", "forward"):
                forward = max(forward, samples * (row.activations - layers.forward[start]) + gathered)
                continue
            now = samples * (row.activations - below + output * is_last)
            new, done = _gradients(layers, place, row, start, end)
            done += row.around if is_last else max(0.0, row.around - at_head)
            if now + new > backward + arriving:
                backward, arriving = now, new
            if now + gathered + new + done > sum(first):
                first = now + gathered, new + done
        if is_last:
            now = samples * (_at_loss(trace, mode) - below + output)
            if now > backward + arriving:
                backward, arriving = now, 0.0
            first = max(first, (now, 0.0), key=sum)
        _, kept_again, again = recomputed_in_halves(pieces[start:end], mode)
        is_sent = not is_last and ranks[stage + 1] != ranks[stage]
        answers = bool(start) and ranks[stage - 1] != ranks[stage]
        found.append(
            _Stage(
                samples * _saved(trace, mode, layers, start, end), forward, backward, arriving, first, gradients,
                sum(units.values()),
                samples * sum(piece.delayed_bytes for piece in pieces[start:end]),
                samples * kept_again, samples * again,
                samples * (inputs + (0.0 if is_last else output)), samples * output * is_sent,
                samples * inputs * answers,
            )
        )  # fmt: skip
    return found


def _gathered_units(trace: StepTrace, own: Iterable[int], ranks: int, width: int) -> dict[int, float]:
    """Return the bytes of a stage's gathered parameters, with their padding, by unit."""
    units = dict[int, float]()
    for row in (trace.parameters[index] for index in own):
        if not row.is_whole:
            units[row.unit] = units.get(row.unit, 0.0) + width * padded_elements(row.shape, ranks)
    return units


def _gathered_at(row: Moment, units: Mapping[int, float], last: int) -> float:
    """Return the bytes of a stage's gathered parameters at a moment, if they are freed after each pass.

    Args:
        row: The moment.
        units: Bytes of the stage's units, with unit 0, which is gathered in all passes.
        last: Number of the model's last unit.
    """
    if row.phase in ("enter", "forward"):
        return units.get(0, 0.0) + units.get(row.unit, 0.0) * (row.unit > 0)
    first = row.unit or last - row.done + 1
    return sum(size for unit, size in units.items() if not unit or unit >= first)


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
            place = layers.piece_of[row.done if forward else last - row.done + 1]
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


def _rank_peak(
    step: JobStep,
    table: ScheduleTable,
    rank: int,
    stages: Sequence[_Stage],
    sharded: ShardedStages | None,
    *,
    passes: int,
) -> RankPeak:
    """Return the peak of one rank over the operations of its schedule."""
    own = {number: stage for number, stage in enumerate(stages) if table.stage_ranks[number] == rank}
    received = step.micro_batches // passes * sum(stage.received for stage in own.values())
    running = _Running(
        own,
        keeps_sent=not (step.is_on_gpus or table.blocks),
        sharded=sharded,
        rank=rank,
        has_passed=passes > 1,
    )
    if not running.keeps_sent:
        running.sent = max(stage.answer for stage in own.values())
        running.sent += max(stage.output for stage in own.values()) * (not step.is_on_gpus)
    peak = RankPeak(running.gathered, running.at_end, received + running.sent)
    for op in table.ranks[rank]:
        now, gradients = running.run(op)
        if now + gradients + running.sent + received > sum(peak):
            peak = RankPeak(now, gradients, received + running.sent)
    return peak


class _Running:
    """Memory of one rank while it runs its operations.

    Args:
        stages: The stages of the rank, by number.
        keeps_sent: Whether it keeps the messages that it sends.
        sharded: How stages are sharded; None if they are whole.
        rank: The rank.
        has_passed: Whether gradients of an earlier pass through the pipeline exist.

    Attributes:
        held: Bytes of activations between operations.
        sent: Bytes of messages that are being sent.
        gathered: Bytes of parameters that stay gathered.
        at_end: Bytes of gradients after all operations.
    """

    def __init__(
        self,
        stages: Mapping[int, _Stage],
        *,
        keeps_sent: bool,
        sharded: ShardedStages | None,
        rank: int,
        has_passed: bool,
    ) -> None:
        self.stages, self.keeps_sent, self.sharded = stages, keeps_sent, sharded
        self.held = self.sent = 0.0
        whole = {number: stage.gradients for number, stage in stages.items()}
        self.at_end = sum(whole.values()) if sharded is None else sharded.gradients[rank]
        self.done = whole if has_passed and sharded is None else dict.fromkeys(whole, 0.0)
        self.shards = self.at_end if has_passed and sharded is not None else 0.0
        self.frees = sharded is not None and sharded.stage == 3
        self.gathered = 0.0 if self.frees else sum(stage.gathered for stage in stages.values())

    def run(self, op: ScheduledOp) -> tuple[float, float]:
        """Run an operation, and return the bytes of activations and of gradients at its peak."""
        stage, has_halves = self.stages[op.stage], op.stage > 0
        gradients = sum(self.done.values()) + self.shards
        match op.op:
            case "F":
                now, added = self._forward(stage), 0.0
            case "I":
                now, added = self._first_half(stage) if has_halves else self.held, 0.0
                self.sent += stage.answer * self.keeps_sent
            case _:
                is_second = op.op == "W" and has_halves
                now, added = self._backward(op.stage, is_second=is_second)
                self.sent += stage.answer * (self.keeps_sent and op.op == "B")
        return now + self.gathered, gradients + added

    def _forward(self, stage: _Stage) -> float:
        now = self.held + stage.forward
        self.held += stage.saved - stage.output * self.keeps_sent
        self.sent += stage.output * self.keeps_sent
        return now

    def _first_half(self, stage: _Stage) -> float:
        kept = stage.delayed + stage.kept_again
        now = self.held + max(stage.backward - stage.saved, kept) + stage.gathered * self.frees
        self.held += kept
        return now

    def _backward(self, number: int, *, is_second: bool) -> tuple[float, float]:
        stage = self.stages[number]
        part, added = (stage.backward, stage.arriving) if self.done[number] else stage.first
        self.held -= stage.saved - stage.output * self.keeps_sent
        if is_second:
            self.held -= stage.delayed + stage.kept_again
            part = stage.saved + stage.delayed + stage.again + stage.gathered * self.frees
            added = added if self.sharded is None else stage.gradients
        if self.sharded is None:
            self.done[number] = stage.gradients
        else:
            self.shards = self.at_end
        return self.held + part - stage.output * self.keeps_sent, added
