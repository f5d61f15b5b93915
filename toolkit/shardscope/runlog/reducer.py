"""The reducer of the run log, which turns a run's events into columns and totals as the events arrive.

A `RunLog` depends neither on files nor on torch, so it computes the metrics for runs, the tuner, labs, reports and
tests alike. The time to add an event does not depend on the number of earlier events; averages are computed on access.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shardscope.runlog.divergence import Divergence, divergence_of
from shardscope.runlog.epochs import Epochs
from shardscope.runlog.experts import ExpertLog
from shardscope.runlog.figures import LOSS_WINDOW
from shardscope.runlog.layers import LayerSamples
from shardscope.runlog.resizes import Pause, Resize, resizes_of
from shardscope.runlog.restarts import Restart
from shardscope.runlog.schema import MEMORY_KINDS, OBSERVING, Event, Moved
from shardscope.runlog.steps import (
    ALIKE,
    MOST,
    WARM_UP_STEPS,
    Average,
    Step,
    StepKinds,
    Steps,
    per_step,
    step_end,
    together_s,
    waited_once_s,
)
from shardscope.runlog.stragglers import Circumstances, Phases, Straggler

if TYPE_CHECKING:
    from shardscope.spec import Job


class Evaluation(NamedTuple):
    """Loss and accuracy on one split of the data after a step; NaN if not computed."""

    step: int
    loss: float
    accuracy: float
    split: str = "test"


@dataclass(kw_only=True)
class RunLog:
    """Columns and totals of a run, computed from the events that have been added so far.

    Attributes:
        world_size: Number of ranks, which a resize changes; a step has finished when all its ranks have reported it.
        is_asynchronous: Whether workers take steps without waiting for each other (see `steps.together_s`).
        kinds: The kinds of steps in the job, such as communicating and local steps; averages per step weight them by
            frequency.
        steps: The finished steps, in columns.
        starts: Newest start event of each rank, by rank.
        evaluations: Evaluations during training, in order. They use the validation split; in runs from earlier versions
            of Shardscope, they use the test split.
        final: Evaluation on the test split after the last step; None until then, and in runs from earlier versions.
        peak_memory: Peak memory of each rank in bytes, by rank.
        held: Bytes of each type of memory (see `MEMORY_KINDS`), by rank, from the rank's newest memory event.
        peaks: Bytes of all types together at their peak, by rank, from the same events; of a training loop that
            `ss.observe` recorded, the sum of the types.
        at_peak: Seconds of a step at peak rates, as predicted at the launch: ``compute_s`` and ``sending_s``.
        noise: Two squared gradient norms for each step that measured gradient noise, by step: the mean squared norm of
            the small batches' gradients, and the squared norm of the mean gradient.
        layer_samples: Layer events at a limited number of steps.
        experts: Loads of the experts of a model with experts.
        epochs: Step times and cache hits of each epoch on shards.
        collectives: Training bytes sent by all ranks, by name of the collective.
        observing: Bytes sent by all ranks for measurements, evaluations and checkpoints, by purpose.
        phases: Computing times of the newest steps, by rank and phase.
        circumstances: Consequences of a straggler in the job.
        loss_note: Why the loss may depend on how the batch is split; None if there is no such reason.
        optimizer_note: Why a resumed run may train differently; None if there is no such reason.
        shares: Samples of each rank in a step, as last divided by measured speed; empty if shares are not by speed.
        split: Layers in each stage of a pipeline, as the ranks last split the model; empty for other strategies.
        dropped: Number of gradients that were discarded or not computed because other workers were faster.
        faults: Events of the injected faults, in order.
        restarts: Restarts of the ranks after failures, in order. Steps that a restart repeats replace the earlier ones.
        lost_steps: Number of steps that all ranks had finished, and that restarts had to repeat.
        warm_up: Durations of the first `WARM_UP_STEPS` steps after each start of the ranks, in seconds, by step,
            without those that a restart repeats.
        first_t: Unix time at which the first rank was ready to train (its event `start`), in seconds; 0 until then.
        last_t: Unix time of the newest event, in seconds.

    Example:
        >>> log = RunLog(world_size=1)
        >>> log.feed([{"event": "eval", "rank": 0, "t": 5.0, "step": 10, "loss": 0.5, "accuracy": 0.9}])
        True
        >>> log.evaluations[-1].accuracy, len(log.steps)
        (0.9, 0)
    """

    world_size: int
    is_asynchronous: bool = False
    kinds: StepKinds = ALIKE
    steps: Steps = field(default_factory=Steps)
    starts: dict[int, Event] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    final: Evaluation | None = None
    peak_memory: dict[int, int] = field(default_factory=dict)
    held: dict[int, dict[str, int]] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    at_peak: dict[str, float] = field(default_factory=dict)
    noise: dict[int, tuple[float, float]] = field(default_factory=dict)
    layer_samples: LayerSamples = field(default_factory=LayerSamples)
    experts: ExpertLog = field(default_factory=ExpertLog)
    epochs: Epochs = field(default_factory=Epochs)
    collectives: Counter[str] = field(default_factory=Counter)
    observing: Counter[str] = field(default_factory=Counter)
    phases: Phases = field(default_factory=Phases)
    circumstances: Circumstances = field(default_factory=Circumstances)
    shares: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    loss_note: str | None = None
    optimizer_note: str | None = None
    dropped: int = 0
    faults: list[Event] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    lost_steps: int = 0
    warm_up: dict[int, float] = field(default_factory=dict)
    first_t: float = 0.0
    last_t: float = 0.0
    _open: dict[tuple[int, int], dict[int, Event]] = field(default_factory=dict, repr=False)
    """Events of unfinished steps by rank, for each step and number of ranks that take it."""
    _sizes: dict[int, int] = field(default_factory=dict, repr=False)
    """Number of ranks at the last start of each rank, if its start event states it."""
    _resized_from: dict[int, str] = field(default_factory=dict, repr=False)
    """Source of the state from which a changed number of ranks resumed, by the step after which it was saved."""
    _pauses: dict[int, Pause] = field(default_factory=dict, repr=False)
    """The pause before each step whose number of ranks differs from the previous step."""
    _may_end_apart: bool = False
    """Whether ranks may take different numbers of steps, as in an observed training loop that uses `Join`."""
    _ends: dict[int, int] = field(default_factory=dict, repr=False)
    """Number of steps of each rank that has ended."""
    _num_since_start: int = 0
    """Number of steps since the ranks started."""
    _late: dict[int, list[Event]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return an empty log for a run of this job."""
        from shardscope.spec.observed import (
            ObservedJob,  # needs pydantic, which readers of finished runs do without
        )

        return cls(
            world_size=job.world_size, is_asynchronous=job.strategy.is_asynchronous, kinds=StepKinds.of(job),
            circumstances=Circumstances(job), _may_end_apart=isinstance(job, ObservedJob),
        )  # fmt: skip

    def feed(self, events: Iterable[Event]) -> bool:
        """Add new events, which must be in order for each rank; return whether the log uses any of them."""
        return sum(self._take(event) for event in events) > 0

    def _take(self, event: Event) -> bool:
        self.last_t = max(self.last_t, event["t"])
        kind = event["event"]
        if kind not in ("step", "traffic") and "traffic" in event:
            self.observing[kind] += sum(row["sent_bytes"] for row in event["traffic"].values())
        take = getattr(self, f"_on_{kind}", None)
        if take is not None:
            take(event)
        return take is not None

    def _on_start(self, event: Event) -> None:
        rank, size = event["rank"], event.get("world_size", self.world_size)
        self._sizes[rank] = size
        if size != self.world_size:
            self._resize(size)
        self.starts[rank], self._num_since_start = event, 0
        self.first_t = min(self.first_t or event["t"], event["t"])
        for row in self._open.values():
            row.pop(rank, None)  # a rank that restarts repeats these steps

    def _resize(self, world_size: int) -> None:
        """Continue with a different number of ranks, all of which are new processes."""
        self.world_size = world_size
        self.starts = {rank: start for rank, start in self.starts.items() if rank < world_size}
        self.peak_memory, self.held, self.peaks, self.phases, self.shares = {}, {}, {}, Phases(), ()

    def _on_resize(self, event: Event) -> None:
        if "source" in event:
            self._resized_from[event["step"]] = event["source"]

    def _on_fault(self, event: Event) -> None:
        self.faults.append(event)

    def _on_restart(self, event: Event) -> None:
        self.restarts.append(Restart.of(event))
        self._open.clear()
        self.shares = ()  # ranks measure their speeds again
        self._rewind(event["step"])

    def _on_resume(self, event: Event) -> None:
        """Record the step and source from which ranks resumed; the agent's restart event has only the expected ones."""
        if event["rank"] != 0:
            return
        if self.last_step > event["step"]:
            self._rewind(event["step"])  # earlier than the restart said, if the newest checkpoint is damaged
        if self.restarts and self.restarts[-1].recovered_t is None:
            self.restarts[-1].went_on_from(event)

    def _rewind(self, step: int) -> None:
        """Discard everything recorded after `step`, because training continues from there."""
        lost = self.steps.truncate(step)
        self.lost_steps += lost
        if self.restarts and self.restarts[-1].recovered_t is None:
            self.restarts[-1].lost_steps += lost
        self._late = {number: late for number, late in self._late.items() if number <= step}
        self.noise = {number: each for number, each in self.noise.items() if number <= step}
        self.experts.rewind(step)
        self.warm_up = {number: each for number, each in self.warm_up.items() if number <= step}
        self._pauses = {number: each for number, each in self._pauses.items() if number <= step + 1}
        self.evaluations = [each for each in self.evaluations if each.step <= step]
        self.final = None

    def _on_step(self, event: Event) -> None:
        number, rank = event["step"], event["rank"]
        self.epochs.add_counts(event)
        size = self._sizes.get(rank, self.world_size)
        row = self._open.setdefault((number, size), {})
        row[rank] = event
        if len(row) == size:
            self._finish(number, [row[rank] for rank in sorted(row)])
        elif self._ends:
            self._finish_without_ended()

    def _on_end(self, event: Event) -> None:
        if self._may_end_apart and "steps" in event:
            self._ends[event["rank"]] = event["steps"]
            self._finish_without_ended()

    def _finish_without_ended(self) -> None:
        """Finish the steps that have been taken by all ranks except those that had already ended."""
        for number, size in sorted(self._open):
            row = self._open.get((number, size), {})
            if not row or not all(
                rank in row or self._ends.get(rank, number) < number for rank in range(size)
            ):
                return
            self._finish(number, [row[rank] for rank in sorted(row)])

    def _on_traffic(self, event: Event) -> None:
        """Add traffic that a rank's server sent for a step after the rank had finished that step."""
        number = event["step"]
        is_open = any(step == number for step, _ in self._open)
        if is_open or number > self.last_step:  # clocks differ, so it may come first
            self._late.setdefault(number, []).append(event)
        else:
            late = self._sent([event])
            self.steps.add_traffic(number, late.sent_bytes, late.messages)

    def _finish(self, number: int, row: list[Event]) -> None:
        for place in [place for place in self._open if place[0] <= number]:
            del self._open[place]
        step = _step(number, row, self._sent([*row, *self._late.pop(number, ())]))
        whole = step._replace(world_size=self.world_size) if self._ends else step
        self.steps.append(self._timed(whole, row))
        self.phases.take(number, row)
        self._note_warm_up()
        if self.steps.is_resized and number not in self._pauses:  # a restart may repeat the step
            self._pauses[number] = Pause.before_last(self.steps, self.restarts)
        if self.restarts and self.restarts[-1].recovered_t is None:
            self.restarts[-1].recovered_t = self.steps[-1].t
        self.epochs.add_step(row, self.steps[-1].step_time_s)
        for event in row:
            self.dropped += bool(event.get("dropped"))
            rank, peak = event["rank"], event["peak_memory_bytes"]
            self.peak_memory[rank] = max(self.peak_memory.get(rank, 0), peak)
        if all("noise" in event for event in row):
            small, large = (
                [float(event["noise"][name]) for event in row] for name in ("small_square", "large_square")
            )
            self.noise[number] = fmean(small), fmean(large)

    def _note_warm_up(self) -> None:
        """Record the duration of the last step if it is one of the first since the ranks started."""
        self._num_since_start += 1
        if self._num_since_start <= WARM_UP_STEPS:
            self.warm_up[self.last_step] = self.steps[-1].step_time_s
            if self.restarts and len(self.restarts[-1].first_steps_s) < WARM_UP_STEPS:
                self.restarts[-1].first_steps_s.append(self.steps[-1].step_time_s)

    def _timed(self, step: Step, row: list[Event]) -> Step:
        """Return a step with its duration if ranks do not synchronise in each step; unchanged if they do."""
        if self.is_asynchronous:
            return step._replace(step_time_s=together_s(row))
        if self.kinds.period == 1 or self.last_step != step.number - 1 or not self.steps:
            return step
        return step._replace(step_time_s=waited_once_s(step.step_time_s, step.t, self.steps[-1].t))

    def _sent(self, events: Iterable[Event]) -> Moved:
        """Add the traffic of these events to the totals, and return the part for training, without measurements."""
        moved = Moved()
        for event in events:
            for name, row in event["traffic"].items():
                if name in OBSERVING:
                    self.observing[name] += row["sent_bytes"]
                else:
                    self.collectives[name] += row["sent_bytes"]
                    moved.add(row)
        return moved

    def _on_eval(self, event: Event) -> None:
        if event["rank"] == 0:
            self.evaluations.append(_evaluation(event, event.get("split", "test")))

    def _on_test(self, event: Event) -> None:
        if event["rank"] == 0:
            self.final = _evaluation(event, "test")

    def _on_process(self, event: Event) -> None:
        self.at_peak = event.get("at_peak") or self.at_peak

    def _on_memory(self, event: Event) -> None:
        held = self.held[event["rank"]] = {kind: event[kind] for kind in MEMORY_KINDS}
        self.peaks[event["rank"]] = event.get("peak", sum(held.values()))

    def _on_loss_note(self, event: Event) -> None:
        self.loss_note = event["text"]

    def _on_optimizer_note(self, event: Event) -> None:
        self.optimizer_note = event["text"]

    def _on_shares(self, event: Event) -> None:
        self.shares = tuple(event["samples"])

    def _on_pipeline_layers(self, event: Event) -> None:
        self.split = tuple(event.get("split", ()))

    def _on_layers(self, event: Event) -> None:
        self.layer_samples.take(event)

    def _on_experts(self, event: Event) -> None:
        self.experts.take(event)

    def last_on(self, split: str) -> Evaluation | None:
        """Return the newest evaluation on a split, ``"validation"`` or ``"test"``; None if there is none."""
        if split == "test" and self.final is not None:
            return self.final
        return next((each for each in reversed(self.evaluations) if each.split == split), None)

    def per_step(
        self,
        figure: str,
        *,
        average: Average = "mean",
        until: int | None = None,
        kinds: StepKinds | None = None,
    ) -> float | None:
        """Return the average per step of a field of `Step`; None until each kind of step has occurred.

        The average is over the run, or over the steps since its last resize. See `steps.per_step`.

        Args:
            figure: Name of the field.
            average: How steps of the same kind are averaged.
            until: Last step to count when weighting the kinds of steps; None means the last finished step.
            kinds: The kinds of steps; None means those of the job.
        """
        if figure == "step_time_s" and self.is_asynchronous:
            average = "mean"  # what workers share is divided among steps unevenly
        first = self.steps.since_resize()
        numbers, values = self.steps.column("number")[first:], self.steps.column(figure)[first:]
        return per_step(numbers, values, self.kinds if kinds is None else kinds, average=average, until=until)

    @property
    def last_step(self) -> int:
        """Number of the last finished step; 0 before the first. A resumed run does not start at 1."""
        return self.steps[-1].number if self.steps else 0

    @property
    def resizes(self) -> list[Resize]:
        """Changes of the number of ranks, in order."""
        return resizes_of(self.steps, self._pauses, self._resized_from)

    @property
    def step_time_s(self) -> float | None:
        """Median duration of a step on its slowest rank, in seconds, without warm-up; see `Summary`."""
        return self.per_step("step_time_s", average="median")

    @property
    def bytes_per_step(self) -> float | None:
        """Mean number of training bytes sent by all ranks together in a step, without warm-up."""
        return self.per_step("sent_bytes")

    @property
    def loss(self) -> float | None:
        """Training loss of the last finished step, mean over ranks; None if it is unknown."""
        last = self.steps[-1].loss if self.steps else math.nan
        return None if math.isnan(last) else last

    @property
    def loss_mean(self) -> float | None:
        """Training loss, mean over ranks and over the last `LOSS_WINDOW` finished steps; None if it is unknown."""
        known = [loss for loss in self.steps.column("loss")[-LOSS_WINDOW:] if not math.isnan(loss)]
        return fmean(known) if known else None

    @property
    def divergence(self) -> Divergence | None:
        """Divergence of the loss; None if it has not diverged."""
        return divergence_of(self.steps.column("number"), self.steps.column("loss"))

    @property
    def straggler(self) -> Straggler | None:
        """The rank that takes longer to compute than the other ranks, which usually wait for it; or None."""
        roles = {rank: start.get("role") for rank, start in self.starts.items()}
        return self.phases.straggler(roles, self.circumstances)

    @property
    def wall_s(self) -> float | None:
        """Time from when the first rank was ready to train to the newest event, in seconds; None until then."""
        return self.last_t - self.first_t if self.starts else None

    @property
    def goodput(self) -> float | None:
        """Fraction of the time spent in steps that count, that is, were not repeated; None before the first step.

        The rest is setup, evaluations, checkpoints, steps that a restart repeated, and the restarts themselves.
        """
        return self.useful_s / self.wall_s if self.steps and self.wall_s else None

    @property
    def useful_s(self) -> float:
        """Time of the steps that count, in seconds.

        Ranks that do not begin a step at the same time are in two steps at once; that time counts once. The first steps
        after each start, which also build buckets and allocate memory, count with the usual duration of a step: their
        additional time is a cost of the start.
        """
        usual_s = self.step_time_s or math.inf
        late_s = sum(max(0.0, each - usual_s) for each in self.warm_up.values())
        ends, seconds = self.steps.column("t"), self.steps.column("step_time_s")
        if (
            self.is_asynchronous
        ):  # workers are in several steps at once, and a step's time is already what it adds
            return float(sum(seconds)) - late_s
        before = (-math.inf, *ends[:-1])
        lasted = (
            min(own, max(0.0, end - last)) for last, end, own in zip(before, ends, seconds, strict=True)
        )
        return float(sum(lasted)) - late_s

    @property
    def held_bytes(self) -> int | None:
        """Peak memory of the tensors on the rank with the highest peak, in bytes, in the newest measured step; None if
        not measured.
        """
        return max(self.peaks.values(), default=None)

    @property
    def process_bytes(self) -> int | None:
        """Peak memory in bytes of the process of the rank with the highest peak; None until a step has finished."""
        return max(self.peak_memory.values(), default=None)


def _step(number: int, row: list[Event], moved: Moved) -> Step:
    """Combine the step events of all ranks into one `Step`.

    A single loop is used for speed, because this function runs for every step of every log.
    """
    t, seconds = step_end(row)
    loss = weighted = codec = compute = late = 0.0
    samples = tokens = memory = peak = num_losses = 0
    lr, norm, skipped = row[0]["lr"], math.nan, False
    for event in row:
        if event["loss"] is not None:
            lr = event["lr"] if not num_losses else lr
            loss, num_losses = loss + float(event["loss"]), num_losses + 1
            weighted += float(event["loss"]) * event["samples"]
        if event["grad_norm"] is not None:
            norm = max(float(event["grad_norm"]), norm)  # in this order, max also replaces the initial NaN
        samples, tokens = samples + event["samples"], tokens + (event["tokens"] or 0)
        memory, peak = max(memory, event["memory_bytes"]), max(peak, event["peak_memory_bytes"])
        codec = max(codec, event.get("codec_s", 0.0))
        late = max(late, event.get("late_s", 0.0))
        compute = max(compute, _compute_seconds(event)) if "spans" in event else math.nan
        skipped = skipped or bool(event.get("skipped"))
    lr = math.nan if lr is None else lr  # of an observed optimizer without one
    is_even = len({event["samples"] for event in row if event["loss"] is not None}) < 2
    loss = (loss / num_losses if is_even else weighted / samples) if num_losses else math.nan
    sent = min(moved.sent_bytes, MOST), min(moved.messages, MOST)
    return Step(
        number,
        t,
        loss,
        seconds,
        samples,
        tokens,
        lr,
        norm,
        *sent,
        memory,
        peak,
        codec,
        compute,
        skipped,
        late,
        len(row),
    )


def _compute_seconds(event: Event) -> float:
    return sum(float(end - start) for lane, _, start, end, *_ in event["spans"] if lane == "compute")


def _evaluation(event: Event, split: str) -> Evaluation:
    return Evaluation(event["step"], _number(event["loss"]), _number(event.get("accuracy")), split)


def _number(value: Any) -> float:
    """Convert a value from an event to a float: a number, ``"nan"``, ``"inf"`` or ``"-inf"``; None becomes NaN."""
    return math.nan if value is None else float(value)
