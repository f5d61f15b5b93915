"""Software overhead per message on this machine, measured in a short run whose ranks send very small messages.

The overhead consists of handing the message to the sending thread, to the pacer of an emulated link and to the backend,
and of waking up the receiver. It is a few hundred microseconds per message, and more if there are more ranks than
cores. It is negligible for large messages on slow links, but for many small messages it is a large part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from shardscope.measure.probe import steps_with_spans
from shardscope.runlog.schema import Event
from shardscope.runlog.spans import lane_of
from shardscope.runtime import launch
from shardscope.spec import Job, Link, Strategy

_LATENCY_S = 5e-3
"""Maximum latency of the link in the measurement, in seconds; the overhead does not depend on the latency."""
_BANDWIDTH = 1e12
"""Bandwidth of the link in the measurement, in bytes per second; so high that transfer takes no time."""
_BUCKET_MB = 0.02
"""Bucket size in MiB; it gives the model three buckets of about ten kilobytes each."""
_STEPS = 24
"""Number of steps, large enough that a disturbance of half a second does not change the median."""


def message_seconds(job: Job, link: Link | None) -> float:
    """Return the software overhead of one round of messages, in seconds: its measured time minus the latency.

    Args:
        job: The job. Only its numbers of ranks and threads are used.
        link: The emulated link; its pacing and latency affect the overhead. None for the machine's own link.

    Raises:
        SpecError: The run has no step with the spans of all ranks.
    """
    latency = 0.0 if link is None else min(link.latency_s, _LATENCY_S)
    paced = None if link is None else Link(bandwidth=_BANDWIDTH, latency_s=latency)
    small = Job(
        model="mlp", data="digits", strategy=Strategy("ring", bucket_mb=_BUCKET_MB), world_size=job.world_size,
        batch=job.world_size, threads=job.threads, steps=_STEPS, link=paced, name="messages",
    )  # fmt: skip
    run = launch(small, made_by="message overhead").wait()
    rounds = 2 * (job.world_size - 1)
    found = [took / rounds for row in steps_with_spans(run) for took in _took(row)]
    return max(0.0, median(found) - latency)


def _took(row: list[Event]) -> Iterator[float]:
    """Yield the time of each bucket in one step, in seconds, from the last rank's start to the last rank's end."""
    for together in zip(*(lane_of(event, "communication") for event in row), strict=True):
        yield max(end for _, end in together) - max(start for start, _ in together)
