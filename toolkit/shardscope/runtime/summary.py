"""Summary of a run in about a dozen numbers, and per-step averages of metrics after warm-up.

Most steps of a run are similar, so their mean or median is representative. Under local SGD they are not: of every
`period` steps only the last communicates with the other ranks, and a median over all steps would report no traffic.
So the two kinds of steps are averaged separately and weighted by how often each occurs in a period, whichever steps
were recorded.
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
"""Warm-up steps excluded at the start, when buckets are built and memory is first touched."""

Average = Literal["mean", "median"]
"""Average over steps of the same kind: mean for additive quantities such as bytes, median for times (outliers)."""


def per_step(by_step: Mapping[int, float], period: int = 1, *, average: Average = "mean") -> float | None:
    """Return the average of a metric per step, over whole periods.

    Args:
        by_step: The metric's value by step, from step 1; steps without a value are left out.
        period: Period of the steps (`Compression.period`); the last step of a period differs from the others.
        average: How steps of the same kind are averaged.

    Returns:
        The average; None if no step has a value, or one of the two kinds of steps has none.

    Example:
        >>> per_step({1: 9, 2: 9, 3: 0, 4: 80, 5: 0, 6: 0, 7: 0}, 4)
        20.0
    """
    steps = sorted(by_step)
    return per_step_of(steps, [by_step[step] for step in steps], period, average=average)


def per_step_of(
    steps: npt.ArrayLike, values: npt.ArrayLike, period: int = 1, *, average: Average = "mean"
) -> float | None:
    """Return the same as `per_step`, given the sorted steps and the value at each as two columns."""
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
"""Names under which traffic is counted that a step sends only for measurements."""
_TOO_FAST = (
    "messages cannot be held back precisely on a link above 5 Gbit/s: copying them through this machine takes about as "
    "long as sending them would, so the run was slower than on a real one"
)


@dataclass(frozen=True)
class Summary:
    """Summary of a run. A field is None where the run did not get that far, or where it does not apply.

    Attributes:
        steps: Optimizer steps finished by all ranks.
        loss: Mean training loss over all ranks at the last step.
        test_loss: Loss on the test split, which is evaluated once, after the job's last step. Runs of earlier versions
            evaluated it during training too, and have no validation split; this is then their last evaluation.
        test_accuracy: Share of right answers on the test split; None for regressions.
        validation_loss: Loss of the last evaluation on the validation split, on which studies choose.
        validation_accuracy: Share of right answers on the validation split; None for regressions.
        step_time_s: Median over steps of the slowest rank's time in seconds, excluding warm-up. Under local SGD, the
            medians of averaging steps and of the others, weighted by frequency; None before the first period is over.
        bytes_per_step: Bytes sent by all ranks together per step (mean, excluding warm-up; over whole periods of local
            SGD). In this and every other field, bytes are training traffic; `observing_bytes` is counted separately.
        peak_memory_bytes: Peak memory of the rank that held most.
        wall_s: Seconds from the first rank's start to the last event.
        link: Emulated link between the ranks; None for the machine's own.
        link_note: Why the figures for this link are unreliable; None where they are reliable.
        compression: Compression of the gradients; this field and the next two are None without compression.
        uncompressed_bytes_per_step: Bytes that all ranks together would send per step without compression, by formula.
        codec_s_per_step: Seconds of encoding and decoding on the slowest rank (mean, as for bytes). Part of the step
            time, or overlapped with the backward pass.
        observing_bytes: Bytes sent by all ranks in the whole run for evaluations, checkpoints and measurements
            (gradient noise scale, consensus distance of gossip). Older runs did not count checkpoint traffic.
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
    validation_loss: float | None = None
    validation_accuracy: float | None = None

    @property
    def bytes_ratio(self) -> float | None:
        """Compression ratio: uncompressed bytes per step, by formula, over bytes sent; None without compression."""
        if not self.uncompressed_bytes_per_step or not self.bytes_per_step:
            return None
        return self.uncompressed_bytes_per_step / self.bytes_per_step


def number(value: Any) -> float:
    """Return a number of an event as a float; non-finite ones are stored as ``"nan"``, ``"inf"`` and ``"-inf"``."""
    return float(value)


def mean_loss(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean loss over the ranks that computed one in a step; None if none did."""
    losses = [number(event["loss"]) for event in events if event["loss"] is not None]
    return sum(losses) / len(losses) if losses else None


def steps_of(events: list[Event]) -> dict[int, list[Event]]:
    """Return the step events by step, in order, with late traffic added; only steps that all ranks have finished."""
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
    """Return a rank's step event plus the traffic of a ``traffic`` event: what its server sent after the step ended."""
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
    """Return the training bytes that one rank sent in a step, from one of its events."""
    return _sent(event, is_training=True)


def _sent(event: Mapping[str, Any], *, is_training: bool) -> int:
    rows = event["traffic"].items()
    return sum(row["sent_bytes"] for name, row in rows if (name not in _OBSERVING) == is_training)


def _observing_bytes(events: Iterable[Event]) -> int:
    told = [event for event in events if "traffic" in event]
    looks = sum(_sent(event, is_training=True) for event in told if event["event"] not in ("step", "traffic"))
    return looks + sum(_sent(event, is_training=False) for event in told)


def summarise(events: list[Event], state: str, job: Job | None = None) -> Summary:
    """Return the summary of these events; with the job, also the compression figures."""
    steps = steps_of(events)
    starts = [event for event in events if event["event"] == "start"]
    validation, test = evaluations_of(events)
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
        test_loss=test[-1]["loss"] if test else None,
        test_accuracy=test[-1]["accuracy"] if test else None,
        validation_loss=validation[-1]["loss"] if validation else None,
        validation_accuracy=validation[-1]["accuracy"] if validation else None,
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


def evaluations_of(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Return the evaluations on the validation split, and those on the test split."""
    curve = [event for event in events if event["event"] == "eval" and event["rank"] == 0]
    tests = [event for event in events if event["event"] == "test" and event["rank"] == 0]
    validation = [event for event in curve if "split" in event]
    return validation, tests or [event for event in curve if "split" not in event]  # of earlier versions


def _link(starts: list[Event]) -> dict[str, Any]:
    link = starts[0].get("link") if starts else None
    if link is None:
        return {}
    return {"link": link["label"], "link_note": None if link["is_accurate"] else _TOO_FAST}


def _compression(job: Job, starts: list[Event], steps: dict[int, list[Event]]) -> dict[str, Any]:
    """The compression fields of the summary; the time is None if no step has finished."""
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
