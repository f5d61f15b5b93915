"""What packing and unpacking takes on this machine: each method's own code, run without a network.

A compressor runs as it does in a job, among ranks that are not there: what it sends comes straight back, as often as
there would be ranks, after a moment that is not counted: a thread that has waited finds its core asleep and its caches
cold, which makes packing a small bucket two to three times as slow as packing one after another. It takes the gradients
bucket by bucket, since each costs something of its own. So the seconds are those of its real code, error feedback
included, for any number of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from shardscope.spec import Job
from shardscope.spec.compression import Shapes
from shardscope.training.collectives.packets import Packets, packet_rows
from shardscope.training.compression import Bucket, Carrier, build_compressor
from shardscope.training.meter import Meter
from shardscope.training.precision import Precision

LARGEST_SAMPLE = 16_000_000
"""Elements that are really packed; what a larger model takes is scaled up from as many."""
MOST_BUCKETS = 32
"""That are really packed, each with its moments of waiting."""
_WARM_UP = 2
_MOMENT_S = 1e-3
"""That an exchange takes, in which the thread that packs sleeps."""


class _Alone(Packets):
    """Packets to ranks that are not there: each answers with what it was sent.

    Attributes:
        waited_s: For the answers so far.
    """

    def __init__(self, world_size: int) -> None:
        self.index, self.world_size = 0, world_size
        self.waited_s = 0.0

    def all_to_all(self, outgoing: Tensor) -> Tensor:
        self._wait()
        return outgoing

    def all_gather(self, own: Tensor, *, name: str = "") -> Tensor:  # noqa: ARG002
        self._wait()
        rows = packet_rows(1, own.numel())
        rows[0] = own
        return rows.expand(self.world_size, -1)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Of one rank."""
        self._wait()
        return tensor

    def _wait(self) -> None:
        start = time.perf_counter()
        time.sleep(_MOMENT_S)
        self.waited_s += time.perf_counter() - start


def codec_seconds(
    job: Job, buckets: Sequence[Shapes], *, world_size: int | None = None, repeats: int = 5
) -> float:
    """Seconds a step that one rank packs and unpacks, on a core of its own.

    Args:
        job: Its compression, precision, optimizer and threads count.
        buckets: Shapes of the tensors of each bucket.
        world_size: Ranks; None for the job's.
        repeats: Steps timed, after two to warm up; their median counts.
    """
    if not job.compression.is_on:
        return 0.0
    sample = _sample(buckets)
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        seconds = _timed(job, sample, _Alone(world_size or job.world_size), _WARM_UP + repeats)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds[_WARM_UP:]) * _elements(buckets) / _elements(sample)


def _timed(job: Job, buckets: Sequence[Shapes], others: _Alone, steps: int) -> list[float]:
    """Seconds of each step."""
    compressor, carrier = build_compressor(job), Carrier(others.sum_, others, Meter(), job.seed)
    assert compressor is not None
    dtype = Precision(job.precision, torch.device("cpu")).weight_dtype
    gradients = [torch.randn(_elements([shapes]), dtype=dtype) for shapes in buckets]
    seconds = []
    for step in range(1, steps + 1):
        filled = [
            Bucket(
                [f"tensor-{index}-{number}" for number in range(len(shapes))],
                [torch.Size(shape) for shape in shapes],
                flat.clone(),
                step,
            )
            for index, (shapes, flat) in enumerate(zip(buckets, gradients, strict=True))
        ]
        start, waited = time.perf_counter(), others.waited_s
        compressor.begin_step(step)
        for bucket in filled:
            compressor.mean_(bucket, carrier)
        seconds.append(time.perf_counter() - start - (others.waited_s - waited))
    return seconds


def _elements(buckets: Sequence[Shapes]) -> int:
    return sum(prod(shape) for shapes in buckets for shape in shapes)


def _sample(buckets: Sequence[Shapes]) -> list[list[tuple[int, ...]]]:
    """The first tensors, at least one, up to a number of elements and of buckets, in their buckets."""
    taken: list[list[tuple[int, ...]]] = []
    filled = 0
    for shapes in buckets[:MOST_BUCKETS]:
        taken.append([])
        for shape in shapes:
            if filled and filled + prod(shape) > LARGEST_SAMPLE:
                return [bucket for bucket in taken if bucket]
            taken[-1].append(shape)
            filled += prod(shape)
    return taken
