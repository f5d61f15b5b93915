"""Count sketch: a short vector whose squared norm is an unbiased estimate of that of a long vector.

Every element gets a random sign and one of `SIZE` buckets, the same on all ranks, and each bucket sums its signed
elements (Charikar, Chen, Farach-Colton 2002). Sketches are additive: the sketch of a sum is the sum of the sketches.
Over random draws, the squared norm has mean ``|g|^2`` and a standard deviation of at most ``sqrt(2 / SIZE) |g|^2``. So
estimating the norm of a mean gradient takes only the traffic of one sketch, whatever the size of the gradients.

A sign is drawn for each element. A bucket is drawn only for the first element of each run of `SIZE` consecutive
elements; the rest of the run goes to the buckets that follow, cyclically. Elements of different runs collide with
probability 1 / `SIZE`, which suffices for the bound. Elements of the same run never collide, and a whole run is added
in one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardscope.training.compression.noise import draw, keys_of

SIZE = 4096
"""Number of buckets, a power of two; the relative standard deviation of the squared norm is 2.2 % per draw."""
_APART = 7919
_PLACES = 0x51ED2705
"""Seed mask that separates the random numbers for buckets from those for signs."""


class Sketch:
    """The sketch of all tensors added to it, concatenated.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2 * SIZE, device=device)  # a run starts anywhere in the first half

    def add(self, values: Tensor, seed: int) -> None:
        """Add a tensor of any shape; `seed` determines signs and buckets.

        Args:
            values: The tensor to add.
            seed: Use a different seed for each tensor, and the same one on all ranks.
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
    """Return the bucket of each run's first element, as plain integers, because most tensors have only one run."""
    return [keys_of((seed ^ _PLACES) + _APART * run)[1] % SIZE for run in range(count)]


def add_runs_(sums: Tensor, signed: Tensor, places: Sequence[int]) -> None:
    """Add each run in one operation, which is faster on a CPU than `add_elements_`."""
    for run, place in zip(signed.split(SIZE), places, strict=True):
        sums[place : place + run.numel()] += run


def add_elements_(sums: Tensor, signed: Tensor, places: Sequence[int]) -> None:
    """Add the elements of all runs in one operation."""
    firsts = torch.tensor(places, device=sums.device).repeat_interleave(SIZE)[: signed.numel()]
    within = torch.arange(signed.numel(), device=sums.device).remainder_(SIZE)
    sums.index_add_(0, firsts + within, signed.to(sums.dtype))
