"""What packing and unpacking takes on this machine: each method's own code, run without a network.

A compressor runs as it does in a job, among ranks that are not there: what it sends comes straight back, as often as
there would be ranks. So the seconds are those of its real code, error feedback included, for any number of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from shardscope.spec import Job
from shardscope.training.collectives.packets import Packets, packet_rows
from shardscope.training.compression import Bucket, Carrier, build_compressor
from shardscope.training.meter import Meter

LARGEST_SAMPLE = 16_000_000
"""Elements that are really packed; what a larger model takes is scaled up from as many."""
_WARM_UP = 2


class _Alone(Packets):
    """Packets to ranks that are not there: each answers with what it was sent."""

    def __init__(self, world_size: int) -> None:
        self.index, self.world_size = 0, world_size

    def all_to_all(self, outgoing: Tensor) -> Tensor:
        return outgoing

    def all_gather(self, own: Tensor) -> Tensor:
        rows = packet_rows(1, own.numel())
        rows[0] = own
        return rows.expand(self.world_size, -1)


def codec_seconds(
    job: Job, shapes: Sequence[tuple[int, ...]], *, world_size: int | None = None, repeats: int = 5
) -> float:
    """Seconds a step that one rank packs and unpacks, on a core of its own.

    Args:
        job: Its compression, optimizer and threads count.
        shapes: Of the model's tensors.
        world_size: Ranks; None for the job's.
        repeats: Steps timed, after two to warm up; their median counts.
    """
    if not job.compression.is_on:
        return 0.0
    compressor = build_compressor(job)
    assert compressor is not None
    sample = _sample(shapes)
    flat = torch.randn(sum(prod(shape) for shape in sample))
    names = [f"tensor-{number}" for number in range(len(sample))]
    carrier = Carrier(lambda tensor: tensor, _Alone(world_size or job.world_size), Meter(), job.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    seconds = []
    try:
        for step in range(1, _WARM_UP + repeats + 1):
            bucket = Bucket(names, [torch.Size(shape) for shape in sample], flat.clone(), step)
            start = time.perf_counter()
            compressor.begin_step(step)
            compressor.mean_(bucket, carrier)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    whole, taken = sum(prod(shape) for shape in shapes), flat.numel()
    return statistics.median(seconds[_WARM_UP:]) * whole / taken


def _sample(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The first tensors, at least one, of at most so many elements in all."""
    taken: list[tuple[int, ...]] = []
    for shape in shapes:
        if taken and sum(prod(other) for other in taken) + prod(shape) > LARGEST_SAMPLE:
            break
        taken.append(shape)
    return taken
