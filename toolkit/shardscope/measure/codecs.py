"""Packing and unpacking times on this machine: each method's own code, run without a network.

A compressor runs as in a job, but with simulated peers: every rank appears to send the compressor's own packet, after a
short sleep that is not counted. The sleep matters, because a thread that has waited finds its core idle and its caches
cold: packing a small bucket then takes two to three times as long as packing consecutive ones. Gradients are packed
bucket by bucket, since each bucket has a fixed cost. So the times are those of the real code, including error feedback,
for any number of ranks.
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
"""Maximum number of elements that are actually packed; the time for a larger model is extrapolated."""
MOST_BUCKETS = 32
"""Maximum number of buckets that are actually packed, each with its waits."""
_WARM_UP = 2
_MOMENT_S = 1e-3
"""Time of one simulated exchange, during which the packing thread sleeps, in seconds."""


class _Alone(Packets):
    """Exchange of packets with simulated ranks, each of which sends the packet of this rank.

    Attributes:
        waited_s: Time spent waiting so far, in seconds.
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
        """Return the tensor itself, as the sum over one rank."""
        self._wait()
        return tensor

    def _wait(self) -> None:
        start = time.perf_counter()
        time.sleep(_MOMENT_S)
        self.waited_s += time.perf_counter() - start


def codec_seconds(
    job: Job, buckets: Sequence[Shapes], *, world_size: int | None = None, repeats: int = 5
) -> float:
    """Return the time per step that one rank spends on packing and unpacking, on its own core, in seconds.

    Args:
        job: Its compression, precision, optimizer and threads are used.
        buckets: Shapes of the tensors in each bucket.
        world_size: Number of ranks; None takes the job's.
        repeats: Number of steps to time after two warm-up steps; the result is their median.
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
    """Return the time of packing and unpacking in each step, in seconds."""
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
    """Return the first tensors by bucket, at most `LARGEST_SAMPLE` elements (but at least one tensor).

    At most `MOST_BUCKETS` buckets are taken.
    """
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
