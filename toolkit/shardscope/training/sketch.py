"""Count sketch: a short vector whose squared norm is an unbiased estimate of a long vector's; sketches are additive.

Every element gets a random sign and one of `SIZE` buckets, the same on all ranks, and each bucket sums its elements
(Charikar, Chen, Farach-Colton 2002). Over the draws, the squared norm has the mean ``|g|^2`` and a standard deviation
of at most ``sqrt(2 / SIZE) |g|^2``. So the norm of a mean of gradients costs only the bytes of a sketch, whatever the
gradients' size.

Signs are drawn for each element. Buckets are drawn for each run of `SIZE` consecutive elements: the draw places the
first, and the others follow. Two elements of different runs still collide with a probability of 1 / `SIZE`, which
suffices for the bound. Two of the same run never collide, and a run is added by one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardscope.training.compression.noise import draw, keys_of

SIZE = 4096
"""Number of buckets, a power of two; the relative standard deviation is 2.2 % per draw."""
_APART = 7919
_PLACES = 0x51ED2705
"""Seed mask that separates the random numbers of places from those of signs."""


class Sketch:
    """The sketch of all tensors that have been added to it.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2 * SIZE, device=device)  # a run begins anywhere in the first half

    def add(self, values: Tensor, seed: int) -> None:
        """Add a tensor of any shape; `seed` draws signs and places, different per tensor, the same on all ranks."""
        signs = draw(keys_of(seed), 0, values.numel(), 1).mul_(-2).add_(1).to(values.device)
        signed = values.reshape(-1) * signs
        places = _places(seed, -(-values.numel() // SIZE))
        if self._sums.device.type == "cpu":
            add_runs_(self._sums, signed, places)
        else:
            add_elements_(self._sums, signed, places)

    @property
    def buckets(self) -> Tensor:
        """The sketch itself: `SIZE` numbers, float32."""
        return self._sums[:SIZE] + self._sums[SIZE:]


def _places(seed: int, count: int) -> list[int]:
    """Bucket of each run's first element, as plain integers, since most tensors are one run."""
    return [keys_of((seed ^ _PLACES) + _APART * run)[1] % SIZE for run in range(count)]


def add_runs_(sums: Tensor, signed: Tensor, places: Sequence[int]) -> None:
    """Add the runs by one operation each: on a CPU the faster of the two."""
    for run, place in zip(signed.split(SIZE), places, strict=True):
        sums[place : place + run.numel()] += run


def add_elements_(sums: Tensor, signed: Tensor, places: Sequence[int]) -> None:
    """Add all elements in one operation."""
    firsts = torch.tensor(places, device=sums.device).repeat_interleave(SIZE)[: signed.numel()]
    within = torch.arange(signed.numel(), device=sums.device).remainder_(SIZE)
    sums.index_add_(0, firsts + within, signed.to(sums.dtype))
