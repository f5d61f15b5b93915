"""Peak memory of one rank of a pipeline over the operations of its schedule; see `analytic.memory.pipelines`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.sharded_stages import Alive, StageStates
from shardscope.analytic.memory.split_stages import SplitStage
from shardscope.analytic.schedules.table import ScheduledOp, ScheduleTable


class RankPeak(NamedTuple):
    """Bytes at a rank's peak of memory that varies within a step, and of messages."""

    activations: float
    """Activations and, with ZeRO 2 and 3, gathered parameters."""
    gradients: float
    messages: float
    """Buffers of received messages, and messages that are being sent."""


class StageMemory(NamedTuple):
    """Bytes of one micro-batch on one stage, and of its parameters and gradients.

    Parameters that are freed after each pass are part of the peaks of passes.
    """

    states: StageStates
    saved: float
    """Activations saved from the forward to the backward pass, including the stage's output but not its input."""
    forward: float
    """The peak of the forward pass."""
    first: Alive
    """The peak of a backward pass, if the stage has no gradients yet."""
    later: Alive
    """The peak of a backward pass, if an earlier one has left gradients, which are not part of it."""
    split: SplitStage | None
    """None unless the backward pass is split."""
    inputs: float
    """The stage's input; its gradient has the same size."""
    received: float
    """The stage's input and the gradient of its output."""
    output: float
    """Output of the stage if it is sent to another rank, else 0."""
    handed_on: float
    """Output of the stage if the rank's next stage takes it as its input, else 0."""
    answer: float
    """Gradient of the stage's input if it is sent to another rank, else 0."""


def rank_peak(
    step: JobStep,
    table: ScheduleTable,
    rank: int,
    stages: Mapping[int, StageMemory],
    *,
    passes: int,
    keeps_gradients: bool,
    exchanged: float,
) -> RankPeak:
    """Return the peak of one rank over the operations of its schedule.

    Args:
        step: A step of a job.
        table: The schedule of one pass.
        rank: The rank.
        stages: Its stages, by number.
        passes: Number of passes in a step. Gradients of the first pass exist during all later passes.
        keeps_gradients: Whether whole gradients are in buckets that exist throughout the step.
        exchanged: Bytes of the copy of gradients that is exchanged after all passes.
    """
    count = step.micro_batches // passes
    received = count * sum(stage.received for stage in stages.values())
    running = _Running(
        stages,
        keeps_sent=not (step.is_on_gpus or table.blocks),
        has_passed=passes > 1,
        keeps_gradients=keeps_gradients,
        count=count,
    )
    if not running.keeps_sent:
        running.sent = max(stage.answer for stage in stages.values())
        running.sent += max(stage.output for stage in stages.values()) * (not step.is_on_gpus)
    peak = RankPeak(0.0, running.at_end + exchanged, received + running.sent)
    for op in table.ranks[rank]:
        messages = received + running.sent
        now = running.run(op)
        if sum(now) + messages > sum(peak):
            peak = RankPeak(*now, messages)
    return peak


class _Running:
    """Memory of one rank while it runs its operations.

    Args:
        stages: The stages of the rank, by number.
        keeps_sent: Whether it keeps the messages that it sends.
        has_passed: Whether an earlier pass through the pipeline has left gradients.
        keeps_gradients: Whether whole gradients exist throughout.
        count: Number of micro-batches in a pass.

    Attributes:
        held: Bytes of activations between operations.
        sent: Bytes of messages that are being sent.
        gathered: Bytes of parameters that stay gathered between passes, by stage.
        done: Bytes of gradients that backward passes have left, without `whole`, by stage.
        whole: Bytes of gradients that several stages share or that are not reduced, by parameter.
        at_end: Bytes of gradients after all operations.
    """

    def __init__(
        self,
        stages: Mapping[int, StageMemory],
        *,
        keeps_sent: bool,
        has_passed: bool,
        keeps_gradients: bool,
        count: int,
    ) -> None:
        self.stages, self.keeps_sent, self.has_passed = stages, keeps_sent, has_passed
        self.held = self.sent = 0.0
        self.left = dict.fromkeys(stages, count)
        self.gathered: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self.whole: dict[int, float] = {}
        for number in stages:
            self._leave(number)
        self.at_end = self.gradients
        if has_passed:
            self.gathered = {number: self._kept_gathered(number) for number in stages}
        elif not keeps_gradients:
            self.done, self.whole = {}, {}

    @property
    def gradients(self) -> float:
        """Bytes of gradients between operations."""
        return sum(self.done.values()) + sum(self.whole.values())

    def run(self, op: ScheduledOp) -> Alive:
        """Run an operation, and return the bytes at its peak."""
        stage = self.stages[op.stage]
        self.gathered[op.stage] = self._kept_gathered(op.stage)
        gathered, gradients = sum(self.gathered.values()), self.gradients
        match op.op:
            case "F":
                now = self._forward(stage)
            case "I":
                now = Alive(self.held) if stage.split is None else self._for_inputs(stage, stage.split)
                self.sent += stage.answer * self.keeps_sent
            case _:
                now = self._backward(op.stage, stage.split if op.op == "W" else None)
                self.sent += stage.answer * (self.keeps_sent and op.op == "B")
        return Alive(now.activations + gathered, now.gradients + gradients)

    def _kept_gathered(self, number: int) -> float:
        states = self.stages[number].states
        return 0.0 if states.frees else states.gathered

    def _leave(self, number: int) -> None:
        """Keep the gradients of a stage after a backward pass."""
        states = self.stages[number].states
        self.done[number] = states.shards
        self.whole |= states.whole

    def _lent(self, stage: StageMemory) -> float:
        """Return the bytes of a stage's output that count as messages."""
        return stage.handed_on + stage.output * self.keeps_sent

    def _forward(self, stage: StageMemory) -> Alive:
        now = self.held + stage.forward
        self.held += stage.saved - self._lent(stage)
        self.sent += stage.output * self.keeps_sent
        return Alive(now)

    def _for_inputs(self, stage: StageMemory, split: SplitStage) -> Alive:
        now = self.held + split.for_inputs + stage.states.gathered * stage.states.frees
        self.held += split.between
        return Alive(now)

    def _backward(self, number: int, split: SplitStage | None) -> Alive:
        stage = self.stages[number]
        states, lent, has_gradients = stage.states, self._lent(stage), number in self.done
        peak = stage.later if has_gradients else stage.first
        self.held -= stage.saved - lent
        if split is not None:
            self.held -= split.between
            peak = split.later if has_gradients else split.first
            peak = peak._replace(activations=peak.activations + states.gathered * states.frees)
        self._leave(number)
        self.left[number] -= 1
        is_last = not self.left[number] and not self.has_passed
        reduced = states.reduction(has_gradients=has_gradients, frees=states.frees or is_last)
        around = self.held + stage.inputs - self.gathered[number] * is_last
        if is_last:
            self.gathered[number] = 0.0
        return max(
            Alive(self.held + peak.activations - lent, peak.gradients),
            Alive(around + reduced.activations, reduced.gradients),
            key=sum,
        )
