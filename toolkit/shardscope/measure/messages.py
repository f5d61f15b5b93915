"""What a message costs in software on this machine: a short run of real ranks that have next to nothing to send.

Handing over to the thread that sends, to the pacer of a link, to the backend, and waking up whoever waits on the other
side: some hundred microseconds a message, and more where there are more ranks than cores. Beside large messages on slow
links that is nothing; of many small ones it is a good part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from shardscope.measure.probe import steps_with_spans
from shardscope.runtime import launch
from shardscope.runtime.tail import Event
from shardscope.spec import Job, Link, Strategy

_LATENCY_S = 5e-3
"""A link's latency while it is measured, at most: what comes on top of it is the same."""
_BANDWIDTH = 1e12
"""On which the bytes of the messages take no time, bytes a second."""
_BUCKET_MB = 0.02
"""The model's buckets: three of some ten kilobytes."""
_STEPS = 24
"""As many as a disturbance of half a second does not outweigh."""


def message_seconds(job: Job, link: Link | None) -> float:
    """Seconds that a round of messages takes beyond its latency, among as many ranks and threads as the job has.

    Args:
        job: Its numbers of ranks and threads count.
        link: Whether they are held to one makes a difference, and whether it has a latency; None for the machine's own.

    Raises:
        SpecError: The run wrote no step down in full.
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
    """Each bucket of one step, from when the last rank came to when the last was done."""
    for together in zip(*map(_buckets, row), strict=True):
        yield max(end for _, end in together) - max(start for start, _ in together)


def _buckets(event: Event) -> list[tuple[float, float]]:
    return sorted((start, end) for lane, _, start, end, _ in event["spans"] if lane == "communication")
