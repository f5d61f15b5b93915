"""What PowerSGD costs a rank beside the wire, on the gradient of a 25 M parameter GPT, in copies of that gradient.

Run it as ``python tests/benchmarks/powersgd.py [threads ...]``. One rank's whole `mean_` is timed, with sums that do
nothing: products, orthonormalization, error feedback, unpacking. The gradient lies in one bucket, or in five.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _report import compare
from optimizer_step import gpt_parameters
from torch import Tensor

from shardscope.methods.compressors.powersgd._torch import PowerSgdCompressor
from shardscope.training.compression import Bucket, Carrier
from shardscope.training.meter import Meter


class OneRank:
    """Packets among one rank: none."""

    world_size, index = 1, 0


def buckets_of(shapes: list[torch.Size], cap_bytes: float) -> list[Bucket]:
    """Tensors in their order, a new bucket wherever one is full; each with a gradient of noise."""
    groups: list[list[int]] = [[]]
    for i in range(len(shapes)):
        if 4 * sum(shapes[k].numel() for k in [*groups[-1], i]) > cap_bytes and groups[-1]:
            groups.append([])
        groups[-1].append(i)
    return [
        Bucket([f"p{i}" for i in group], [shapes[i] for i in group],
               torch.randn(sum(shapes[i].numel() for i in group)), 1)
        for group in groups
    ]  # fmt: skip


def step_of(buckets: list[Bucket], rank: int, *, feedback: bool) -> Callable[[], None]:
    """One step's compression of all buckets."""
    compressor = PowerSgdCompressor(rank, feedback=feedback, seed=0)
    carrier = Carrier(lambda flat: flat, OneRank(), Meter(), 0)  # type: ignore[arg-type]

    def step() -> None:
        for bucket in buckets:
            compressor.mean_(bucket, carrier)
        carrier.meter.drain()

    return step


def main() -> None:
    shapes = [parameter.shape for parameter in gpt_parameters()]
    whole, cut = buckets_of(shapes, float("inf")), buckets_of(shapes, 25 * 2**20)
    source: Tensor = whole[0].flat.clone()
    target = torch.empty_like(source)
    print(f"{source.numel() / 1e6:.1f} M elements in {len(shapes)} tensors; {len(cut)} buckets where cut")
    for threads in [int(count) for count in sys.argv[1:]] or [1, 2]:
        torch.set_num_threads(threads)
        print(f"\n{threads} thread{'s' * (threads > 1)}")
        steps = {
            f"rank {rank}{', feedback' * feedback}{', buckets' * (buckets is cut)}": step_of(
                buckets, rank, feedback=feedback
            )
            for rank in (1, 4, 8)
            for feedback in (False, True)
            for buckets in (whole, cut)
        }
        compare({"copy": lambda: target.copy_(source), **steps}, rounds=11, baseline="copy")


if __name__ == "__main__":
    main()
