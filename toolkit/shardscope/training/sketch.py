"""Count sketch: a short vector whose squared norm is an unbiased estimate of the squared norm of a long vector.

Each element of the long vector g gets a random sign and one of `SIZE` random buckets, the same on all ranks. Each
bucket is the sum of its signed elements (Charikar, Chen, Farach-Colton 2002). The sketch of a sum is the sum of the
sketches. Over random draws, the squared norm of the sketch has mean ``|g|^2`` and a standard deviation of at most
``sqrt(2 / SIZE) |g|^2``. So to estimate the norm of a mean gradient, the ranks only need to sum their sketches, however
large the gradients are.

Each element has its own random sign. A random bucket is drawn only for the first of each `SIZE` consecutive elements (a
run); the other elements of the run get the buckets that follow, cyclically. Elements of different runs share a bucket
with probability 1 / `SIZE`, which is sufficient for the bound. Elements of the same run never share a bucket, so a
whole run can be added in one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardscope.training.compression.noise import draw, keys_of

SIZE = 4096
"""Number of buckets, a power of two; the relative standard deviation of the squared norm is 2.2 % per draw."""
_SEED_STRIDE = 7919
_BUCKET_SEED = 0x51ED2705
"""Constant combined with the seed, so that the random numbers for buckets differ from those for signs."""


class Sketch:
    """Count sketch of the concatenation of all tensors that were added to it.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2 * SIZE, device=device)  # each run starts in the first half

    def add(self, values: Tensor, seed: int) -> None:
        """Add a tensor of any shape; `seed` determines signs and buckets.

        Args:
            values: The tensor to add.
            seed: A different seed for each tensor, but the same on all ranks.
        """
        signs = draw(keys_of(seed), 0, values.numel(), 1).mul_(-2).add_(1).to(values.device)
        signed = values.reshape(-1) * signs
        places = _places(seed, -(-values.numel() // SIZE))
        if self._sums.device.type == "cpu":
            add_runs_(self._sums, signed, places)
        else:
            add_elements_(self._sums, signed, places)

    @property
    def buckets(self) -> Tensor:
        """The sketch itself: a float32 vector of length `SIZE`."""
        return self._sums[:SIZE] + self._sums[SIZE:]


def _places(seed: int, count: int) -> list[int]:
    """Return the bucket of the first element of each run, as Python integers, because most tensors have one run."""
    return [keys_of((seed ^ _BUCKET_SEED) + _SEED_STRIDE * run)[1] % SIZE for run in range(count)]


def add_runs_(sums: Tensor, signed: Tensor, places: Sequence[int]) -> None:
    """Add signed elements to the buckets, one run per operation; faster on a CPU than `add_elements_`."""
    for run, place in zip(signed.split(SIZE), places, strict=True):
        sums[place : place + run.numel()] += run


def add_elements_(sums: Tensor, signed: Tensor, places: Sequence[int]) -> None:
    """Add signed elements to the buckets, all runs in one operation."""
    firsts = torch.tensor(places, device=sums.device).repeat_interleave(SIZE)[: signed.numel()]
    within = torch.arange(signed.numel(), device=sums.device).remainder_(SIZE)
    sums.index_add_(0, firsts + within, signed.to(sums.dtype))
