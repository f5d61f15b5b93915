"""Software overhead per message on this machine, measured by a short run of real ranks that send very small messages.

The overhead is the hand-over to the sending thread, to the pacer of a link and to the backend, and waking up the
receiver. It is some hundred microseconds per message, and more with more ranks than cores. For large messages on slow
links it is negligible; for many small messages it is a large part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from shardscope.measure.probe import steps_with_spans
from shardscope.runlog.spans import lane_of
from shardscope.runlog.traffic import Event
from shardscope.runtime import launch
from shardscope.spec import Job, Link, Strategy

_LATENCY_S = 5e-3
"""Largest latency of the link in the measurement, in seconds; the overhead does not depend on it."""
_BANDWIDTH = 1e12
"""Bandwidth of the link in the measurement, in bytes per second: so high that the bytes take no time."""
_BUCKET_MB = 0.02
"""Bucket size, which gives the model three buckets of some ten kilobytes."""
_STEPS = 24
"""Enough steps that a disturbance of half a second does not change the median."""


def message_seconds(job: Job, link: Link | None) -> float:
    """Seconds that a round of messages takes beyond its latency, with the job's numbers of ranks and threads.

    Args:
        job: Its numbers of ranks and threads are used.
        link: The emulated link; pacing and its latency affect the overhead. None for the machine's own link.

    Raises:
        SpecError: The run has no step with the spans of all ranks.
    """
    latency = 0.0 if link is None else min(link.latency_s, _LATENCY_S)
    paced = None if link is None else Link(bandwidth=_BANDWIDTH, latency_s=latency)
    small = Job(
        model="mlp", data="digits", strategy=Strategy("ring", bucket_mb=_BUCKET_MB), world_size=job.world_size,
        batch=job.world_size, threads=job.threads, steps=_STEPS, link=paced, name="messages",
    )  # fmt: skip
    run = launch(small).wait()
    rounds = 2 * (job.world_size - 1)
    found = [took / rounds for row in steps_with_spans(run) for took in _took(row)]
    return max(0.0, median(found) - latency)


def _took(row: list[Event]) -> Iterator[float]:
    """Seconds of each bucket of one step, from the start of the last rank to the end of the last rank."""
    for together in zip(*(lane_of(event, "communication") for event in row), strict=True):
        yield max(end for _, end in together) - max(start for start, _ in together)
