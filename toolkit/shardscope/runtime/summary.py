"""The figures of a run in a dozen numbers, and what a figure comes to per step once the first steps are over.

Most steps of a run are alike, and their mean or median says what one is like. Under local SGD they are not: of every
`period` steps only the last one talks to the other ranks. A median of such steps would say that nothing is ever sent.
So the two sorts of steps are taken apart and weighted as often as they come, whichever of them were written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardscope.runtime.rundir import RunDir
from shardscope.runtime.tail import Event, read_events
from shardscope.spec import Job

WARM_UP_STEPS = 2
"""Steps left out at the start, where buckets are built and memory is touched for the first time."""

Average = Literal["mean", "median"]
"""Of steps that are alike: the mean for what adds up, such as bytes; the median for times, which stray."""


def per_step(by_step: Mapping[int, float], period: int = 1, *, average: Average = "mean") -> float | None:
    """What a figure comes to per step, over whole periods.

    Args:
        by_step: The figure at each step that has it, from step 1.
        period: Steps after which steps repeat themselves (`Compression.period`); the last of them is unlike the others.
        average: How steps that are alike are averaged.

    Returns:
        None where no step has the figure, or none of one of the two sorts.

    Example:
        >>> per_step({1: 9, 2: 9, 3: 0, 4: 80, 5: 0, 6: 0, 7: 0}, 4)
        20.0
    """
    steps = sorted(by_step)
    return per_step_of(steps, [by_step[step] for step in steps], period, average=average)


def per_step_of(
    steps: npt.ArrayLike, values: npt.ArrayLike, period: int = 1, *, average: Average = "mean"
) -> float | None:
    """As `per_step`, of steps in their order and the figure at each, as columns."""
    numbers, figures = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    mean = np.mean if average == "mean" else np.median
    for first in (WARM_UP_STEPS, 0):
        if period == 1 and len(figures) > first:
            return float(mean(figures[first:]))
        is_last = numbers[first:] % period == 0
        last, others = figures[first:][is_last], figures[first:][~is_last]
        if len(last) and len(others):
            return float((mean(last) + (period - 1) * mean(others)) / period)
    return None


_COUNTS = frozenset({"payload_bytes", "sent_bytes", "received_bytes", "messages", "calls"})
_OBSERVING = frozenset({"noise_scale", "consensus"})
"""The names under which what a step sends only to measure something is counted."""
_TOO_FAST = (
    "messages cannot be held back precisely on a link above 5 Gbit/s: copying them through this machine takes about as "
    "long as sending them would, so the run was slower than on a real one"
)


@dataclass(frozen=True)
class Summary:
    """What a run came to. None where the run did not get that far, or where it does not apply.

    Attributes:
        steps: Optimizer steps taken by all ranks.
        loss: Mean training loss over all ranks at the last step.
        step_time_s: Median over steps of the slowest rank's time, warm-up left out. Under local SGD, of the steps
            that average and of those between, weighted as often as they come; None before the first period is over.
        bytes_per_step: Sent by all ranks together in a step (mean, warm-up left out; over whole periods of local SGD).
            Here and in every other figure, bytes are those that training sends; what observing it sends is apart.
        peak_memory_bytes: Of the rank that held most.
        wall_s: From the first rank's start to the last event.
        link: What the ranks were held to; None for the machine's own.
        link_note: Why the link's figures are not to be relied on; None where they are.
        compression: How gradients were compressed; this and what follows is None where they were not.
        uncompressed_bytes_per_step: What all ranks together would send in a step without, by formula.
        codec_s_per_step: Packing and unpacking on the slowest rank (mean, as of bytes). Part of the step, or hidden
            behind the backward pass.
        observing_bytes: Sent by all ranks in the whole run for evaluations, checkpoints and measurements (the gradient
            noise scale, the distance of gossiping ranks). Older runs did not count what checkpoints send.
    """

    state: str
    strategy: str | None
    world_size: int
    steps: int
    loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    step_time_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    bytes_per_step: float | None
    peak_memory_bytes: int | None
    wall_s: float | None
    link: str | None = None
    link_note: str | None = None
    compression: str | None = None
    uncompressed_bytes_per_step: float | None = None
    codec_s_per_step: float | None = None
    observing_bytes: int = 0

    @property
    def bytes_ratio(self) -> float | None:
        """How many times more an uncompressed step sends, by formula; None where nothing is compressed."""
        if not self.uncompressed_bytes_per_step or not self.bytes_per_step:
            return None
        return self.uncompressed_bytes_per_step / self.bytes_per_step


def number(value: Any) -> float:
    """A number of an event: non-finite ones are stored as the strings ``"nan"``, ``"inf"``, ``"-inf"``."""
    return float(value)


def mean_loss(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean over the ranks that computed a loss in a step; None if none did."""
    losses = [number(event["loss"]) for event in events if event["loss"] is not None]
    return sum(losses) / len(losses) if losses else None


def steps_of(events: list[Event]) -> dict[int, list[Event]]:
    """The step events by step, in order, with their late traffic; only steps that every started rank has finished."""
    ranks = {event["rank"] for event in events if event["event"] == "start"}
    steps: dict[int, dict[int, Event]] = {}
    for event in events:
        if event["event"] == "step":
            steps.setdefault(event["step"], {})[event["rank"]] = event
    for event in events:
        if event["event"] == "traffic" and event["rank"] in (row := steps.get(event["step"], {})):
            row[event["rank"]] = with_late(row[event["rank"]], event)
    return {step: list(rows.values()) for step, rows in sorted(steps.items()) if len(rows) == len(ranks)}


def with_late(step: Mapping[str, Any], late: Mapping[str, Any]) -> Event:
    """A rank's step event with the traffic of a ``traffic`` event: what its server sent for that step after it."""
    traffic = dict(step["traffic"])
    for name, row in late["traffic"].items():
        before = traffic.get(name)
        traffic[name] = row if before is None else _sum_of(before, row)
    return {**step, "traffic": traffic}


def _sum_of(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    to, more = a.get("sent_to", {}), b.get("sent_to", {})
    counts = {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b} if key in _COUNTS}
    return {**counts, "sent_to": {peer: to.get(peer, 0) + more.get(peer, 0) for peer in {**to, **more}}}


def sent_bytes(event: Mapping[str, Any]) -> int:
    """Bytes that one rank sent to train, by one of its events of a step."""
    return _sent(event, is_training=True)


def _sent(event: Mapping[str, Any], *, is_training: bool) -> int:
    rows = event["traffic"].items()
    return sum(row["sent_bytes"] for name, row in rows if (name not in _OBSERVING) == is_training)


def _observing_bytes(events: Iterable[Event]) -> int:
    told = [event for event in events if "traffic" in event]
    looks = sum(_sent(event, is_training=True) for event in told if event["event"] not in ("step", "traffic"))
    return looks + sum(_sent(event, is_training=False) for event in told)


def summarise(events: list[Event], state: str, job: Job | None = None) -> Summary:
    """The summary of what the events tell; with the job, also what its compression is held against."""
    steps = steps_of(events)
    starts = [event for event in events if event["event"] == "start"]
    evaluations = [event for event in events if event["event"] == "eval" and event["rank"] == 0]
    rows, period = list(steps.values()), 1 if job is None else job.compression.period
    times = {step: max(e["step_time_s"] for e in row) for step, row in steps.items()}
    step_time = per_step(times, period, average="median")
    samples = sum(e["samples"] for e in rows[-1]) if rows else 0
    tokens = sum(e["tokens"] or 0 for e in rows[-1]) if rows else 0
    return Summary(
        state=state,
        strategy=starts[0]["strategy"] if starts else None,
        world_size=len(starts),
        steps=len(rows),
        loss=mean_loss(rows[-1]) if rows else None,
        test_loss=evaluations[-1]["loss"] if evaluations else None,
        test_accuracy=evaluations[-1]["accuracy"] if evaluations else None,
        step_time_s=step_time,
        samples_per_s=samples / step_time if step_time else None,
        tokens_per_s=tokens / step_time if step_time and tokens else None,
        bytes_per_step=per_step({step: sum(map(sent_bytes, row)) for step, row in steps.items()}, period),
        peak_memory_bytes=max((e["peak_memory_bytes"] for row in rows for e in row), default=None),
        wall_s=events[-1]["t"] - starts[0]["t"] if starts else None,
        observing_bytes=_observing_bytes(events),
        **_link(starts),
        **(_compression(job, starts, steps) if job is not None and job.compression.is_on and starts else {}),
    )


def _link(starts: list[Event]) -> dict[str, Any]:
    link = starts[0].get("link") if starts else None
    if link is None:
        return {}
    return {"link": link["label"], "link_note": None if link["is_accurate"] else _TOO_FAST}


def _compression(job: Job, starts: list[Event], steps: dict[int, list[Event]]) -> dict[str, Any]:
    """The figures of a compressed run; those of steps are None where none was taken."""
    codec = {step: max(e["codec_s"] for e in row) for step, row in steps.items()}
    return {
        "compression": job.compression.label,
        "uncompressed_bytes_per_step": job.strategy.exchanged_bytes(
            starts[0]["gradient_bytes"], job.world_size, micro_batches=job.num_micro_batches
        ),
        "codec_s_per_step": per_step(codec, job.compression.period),
    }


def write_summary(run: RunDir, state: str) -> None:
    """Write `summary.json` of a run that has ended in `state`."""
    run.write_json("summary.json", asdict(summarise(read_events(run), state, run.read_job())))
