"""What a job's prediction shows: sentences, trees of terms and a table of its traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardscope.analytic.communication.traffic import Sent
from shardscope.prediction.data_source import WAITING
from shardscope.show import Part, Sentences, Table, Tree
from shardscope.spec.units import bytes_text, figure, plural, work_text

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction

_NAMED = 4
"""Largest number of ranks that a sentence names."""


def shown(found: JobPrediction) -> list[Part]:
    """Return what a prediction shows."""
    trees = [Tree(term) for term in (found.time, found.memory) if term is not None]
    return [Sentences(_headline(found)), *trees, _table(found)]


def _headline(found: JobPrediction) -> tuple[str, ...]:
    job = found.job
    count = plural(job.world_size, "rank")
    fitted = found.calibration or found.host
    about = "no step time" if fitted is None or not found.has_rates else f"calibration {fitted.name}"
    took, held = "step time: unknown", "peak memory per rank: unknown"
    if found.step_time_s is not None and found.run_time_s is not None and found.interval is not None:
        low, high = (figure(each, "s") for each in found.interval)
        took = (
            f"step {figure(found.step_time_s, 's')} ({low} to {high}), {job.last_step} steps "
            f"{figure(found.run_time_s, 's')}{_data_bound(found)}"
        )
    if found.held_bytes is not None and found.peak_bytes is not None:
        held = (
            f"peak memory per rank {figure(found.held_bytes, 'bytes')}{beside_peak(found)} "
            f"({figure(found.peak_bytes, 'bytes')} with the batch and intermediate results)"
        )
    sent = "bytes sent: unknown"
    if found.sent_bytes is not None:
        at_most = "at most " if found.job.strategy.num_dropped else ""
        sent = f"the busiest rank sends {at_most}{figure(float(found.sent_bytes.max()), 'bytes')} a step"
    used = {"MFU": found.mfu, "link utilization": found.link_utilization}
    sent += "".join(f", {name} {each:.1%}" for name, each in used.items() if each is not None)
    return (
        f"{job.label} on {count}, {found.where}, {work_text(job.batch.global_batch, found.seq)}",
        f"{took}; {held}{_misfit(found)}",
        sent,
        *([] if found.note is None else [f"{about}: {found.note}"]),
        *found.assumptions,
    )


def beside_peak(found: JobPrediction) -> str:
    """Clause on what the peak lacks on this machine: work buffers whose size is not known before the run."""
    is_lacking = found.cluster is None and found.states is not None and found.states.buffers is None
    return ", plus work buffers (not predicted)" if is_lacking else ""


def _misfit(found: JobPrediction) -> str:
    """Clause that names the ranks that do not fit, which need not be the fullest; empty if all do."""
    if found.fits is not False:
        return ""
    ranks = found.overfull
    if not ranks:
        return "; all ranks together do not fit"
    named = ", ".join(map(str, ranks[:_NAMED])) + (f" and {len(ranks) - _NAMED} more" * (len(ranks) > _NAMED))
    return f"; rank{'s' * (len(ranks) > 1)} {named} {'does' if len(ranks) == 1 else 'do'} not fit"


def _data_bound(found: JobPrediction) -> str:
    """Clause that says how long ranks wait for data, in each step or in the first epoch; empty if they do not."""
    waits = [term for term in (found.time.walk() if found.time else ()) if term.name == WAITING]
    if waits:
        return f", of which {figure(waits[0].value, 's')} a step waiting for data"
    if found.filling_s > 0:
        return f", of which {figure(found.filling_s, 's')} waiting for data while the first epoch fills the cache"
    return ""


def _table(found: JobPrediction) -> Table:
    """Return a table with one row per collective: bytes and messages per rank, and bytes over all ranks."""
    rows = [
        (
            name,
            _span(sent.bytes, bytes_text),
            _span(sent.messages, "{:,}".format),
            bytes_text(int(sent.bytes.sum())),
            _exactness(sent),
        )
        for name, sent in (found.traffic or {}).items()
    ]
    return Table(["collective", "sent per rank", "messages", "sent by all", ""], rows, gap=1)


def _span(values: Any, text: Callable[[int], str]) -> str:
    """Format one number if all ranks have the same value, else the minimum and the maximum."""
    low, high = int(values.min()), int(values.max())
    return text(low) if low == high else f"{text(low)} to {text(high)}"


def _exactness(sent: Sent) -> str:
    if sent.bounds is None:
        return "exact"
    return " to ".join(bytes_text(int(bound.sum())) for bound in sent.bounds)
