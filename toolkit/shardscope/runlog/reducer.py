"""The reducer of the run log: it turns a run's events, as they arrive, into the columns and totals that readers use.

A `RunLog` depends neither on files nor on torch. A run, the tuner, a lab, a report and a test feed it the same events,
in order for each rank, and read the same values. The cost of adding an event does not depend on how many came before;
averages are computed on access.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shardscope.runlog.averages import ALIKE, Average, StepKinds, per_step
from shardscope.runlog.layers import LayerSamples
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.runlog.steps import MOST, Step, Steps
from shardscope.runlog.traffic import OBSERVING, Event, Moved

if TYPE_CHECKING:
    from shardscope.spec import Job


class Evaluation(NamedTuple):
    """Quality on a split after a step; NaN where it was not computed."""

    step: int
    loss: float
    accuracy: float
    split: str = "test"


@dataclass(kw_only=True)
class RunLog:
    """A run's events so far, reduced.

    Attributes:
        world_size: Number of ranks; a step has finished when all of them have reported it.
        kinds: How the job's steps differ; averages per step are weighted accordingly.
        steps: The finished steps, in columns.
        starts: Start event of each rank, by rank.
        evaluations: Evaluations during training, in order, on the validation split; in runs from earlier versions, on
            the test split.
        final: Evaluation on the test split after the last step; None before it, and in runs from earlier versions.
        peak_memory: Peak memory of each rank in bytes, by rank.
        held: Memory of each rank by kind, in bytes, from its newest memory event.
        noise: Squared gradient norms by step, where gradient noise was measured: the mean over the small batches, and
            that of the mean gradient.
        layer_samples: Trust ratios and residuals of the layers, thinned.
        collectives: Training bytes that all ranks sent, by collective.
        observing: Bytes that all ranks sent for measurements, evaluations and checkpoints, by purpose.
        last_t: Time when the newest event was written, in Unix seconds.

    Example:
        >>> log = RunLog(world_size=1)
        >>> log.feed([{"event": "eval", "rank": 0, "t": 5.0, "step": 10, "loss": 0.5, "accuracy": 0.9}])
        True
        >>> log.evaluations[-1].accuracy, len(log.steps)
        (0.9, 0)
    """

    world_size: int
    kinds: StepKinds = ALIKE
    steps: Steps = field(default_factory=Steps)
    starts: dict[int, Event] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    final: Evaluation | None = None
    peak_memory: dict[int, int] = field(default_factory=dict)
    held: dict[int, dict[str, int]] = field(default_factory=dict)
    noise: dict[int, tuple[float, float]] = field(default_factory=dict)
    layer_samples: LayerSamples = field(default_factory=LayerSamples)
    collectives: Counter[str] = field(default_factory=Counter)
    observing: Counter[str] = field(default_factory=Counter)
    last_t: float = 0.0
    _open: dict[int, dict[int, Event]] = field(default_factory=dict, repr=False)
    _late: dict[int, list[Event]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return an empty log for a run of this job."""
        return cls(world_size=job.world_size, kinds=StepKinds.of(job))

    def feed(self, events: Iterable[Event]) -> bool:
        """Add new events, in order for each rank; return whether any of them is of a kind that is reduced."""
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
        rank = event["rank"]
        self.starts[rank] = event
        for row in self._open.values():
            row.pop(rank, None)  # a rank that restarts repeats these steps

    def _on_step(self, event: Event) -> None:
        number = event["step"]
        row = self._open.setdefault(number, {})
        row[event["rank"]] = event
        if len(row) == self.world_size:
            self._finish(number, [row[rank] for rank in sorted(row)])

    def _on_traffic(self, event: Event) -> None:
        """Add traffic that a rank's server sent for a step after the rank had finished that step."""
        number = event["step"]
        if number in self._open or number > self.last_step:  # clocks may have ordered it before the step
            self._late.setdefault(number, []).append(event)
        else:
            late = self._sent([event])
            self.steps.add_traffic(number, late.sent_bytes, late.messages)

    def _finish(self, number: int, row: list[Event]) -> None:
        for step in [step for step in self._open if step <= number]:
            del self._open[step]
        self.steps.append(_step(number, row, self._sent([*row, *self._late.pop(number, ())])))
        for event in row:
            rank, peak = event["rank"], event["peak_memory_bytes"]
            self.peak_memory[rank] = max(self.peak_memory.get(rank, 0), peak)
        if all("noise" in event for event in row):
            small, large = (
                [float(event["noise"][name]) for event in row] for name in ("small_square", "large_square")
            )
            self.noise[number] = fmean(small), fmean(large)

    def _sent(self, events: Iterable[Event]) -> Moved:
        """Count the traffic of these events and return the training part; traffic for measurements is kept apart."""
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

    def _on_memory(self, event: Event) -> None:
        self.held[event["rank"]] = {kind: event[kind] for kind in MEMORY_KINDS}

    def _on_layers(self, event: Event) -> None:
        self.layer_samples.take(event)

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
        """Return the average of a field of `Step` per step; None until each kind of step has occurred.

        See `averages.per_step`.

        Args:
            figure: Name of the field.
            average: How steps of the same kind are averaged.
            until: Last step up to which kinds are counted for their weights; None takes the last finished step.
            kinds: How the steps differ; None takes the job's kinds.
        """
        numbers, values = self.steps.column("number"), self.steps.column(figure)
        return per_step(numbers, values, self.kinds if kinds is None else kinds, average=average, until=until)

    @property
    def last_step(self) -> int:
        """Number of the last finished step; 0 before the first. A resumed run does not start at 1."""
        return self.steps[-1].number if self.steps else 0

    @property
    def step_time_s(self) -> float | None:
        """Median time of a step on the slowest rank, in seconds, without warm-up."""
        return self.per_step("step_time_s", average="median")

    @property
    def bytes_per_step(self) -> float | None:
        """Mean number of training bytes that all ranks send in a step, without warm-up."""
        return self.per_step("sent_bytes")

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory in bytes of the rank that used most; None until a step has finished."""
        return max(self.peak_memory.values(), default=None)


def _step(number: int, row: list[Event], moved: Moved) -> Step:
    """Return the step from the reports of all ranks. One loop, for speed: it runs for every step of every log."""
    t = seconds = loss = codec = compute = 0.0
    samples = tokens = memory = peak = num_losses = 0
    lr, norm, skipped = row[0]["lr"], math.nan, False
    for event in row:
        t, seconds = max(t, event["t"]), max(seconds, event["step_time_s"])
        if event["loss"] is not None:
            lr = event["lr"] if not num_losses else lr
            loss, num_losses = loss + float(event["loss"]), num_losses + 1
        if event["grad_norm"] is not None:
            norm = max(float(event["grad_norm"]), norm)  # the first norm also replaces NaN
        samples, tokens = samples + event["samples"], tokens + (event["tokens"] or 0)
        memory, peak = max(memory, event["memory_bytes"]), max(peak, event["peak_memory_bytes"])
        codec = max(codec, event.get("codec_s", 0.0))
        compute = max(compute, _compute_seconds(event)) if "spans" in event else math.nan
        skipped = skipped or bool(event.get("skipped"))
    loss = loss / num_losses if num_losses else math.nan
    sent = min(moved.sent_bytes, MOST), min(moved.messages, MOST)
    return Step(
        number, t, loss, seconds, samples, tokens, lr, norm, *sent, memory, peak, codec, compute, skipped
    )


def _compute_seconds(event: Event) -> float:
    return sum(float(end - start) for lane, _, start, end, *_ in event["spans"] if lane == "compute")


def _evaluation(event: Event, split: str) -> Evaluation:
    return Evaluation(event["step"], _number(event["loss"]), _number(event.get("accuracy")), split)


def _number(value: Any) -> float:
    """Return an event's number; NaN for None. Non-finite numbers are stored as ``"nan"``, ``"inf"``, ``"-inf"``."""
    return math.nan if value is None else float(value)
