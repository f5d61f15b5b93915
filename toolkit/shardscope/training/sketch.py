"""A short vector whose squared norm is, on average, that of a long one: and sketches add up as the vectors do.

Every element is given a random sign and one of `SIZE` buckets, the same on all ranks, and each bucket adds up what
falls into it: a count sketch (Charikar, Chen, Farach-Colton 2002). Over the draws its squared norm has the mean
``|g|^2`` and a standard deviation of at most ``sqrt(2 / SIZE) |g|^2``. So the norm of a mean of gradients can be had
from as many bytes as the sketch has, whatever the gradients' size.

Signs are drawn for each element. Buckets are drawn for each run of `SIZE` elements, as the place of its first, and its
others follow: two elements of different runs then still meet in one bucket out of `SIZE` draws, which is all that the
bound needs, two of one run never do, and a run is added by one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardscope.training.compression.noise import draw, keys_of

SIZE = 4096
"""Buckets, a power of two: a relative standard deviation of 2.2 % at each draw."""
_APART = 7919
_PLACES = 0x51ED2705
"""Tells the numbers that places are drawn from from those of the signs."""


class Sketch:
    """Of all tensors that have been added to it.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2 * SIZE, device=device)  # a run begins anywhere in the first half

    def add(self, values: Tensor, seed: int) -> None:
        """Add a tensor of any shape; `seed` draws signs and places, one for each tensor, alike on all ranks."""
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
    """Where each run begins; as plain integers, for most tensors are one run."""
    return [keys_of((seed ^ _PLACES) + _APART * run)[1] % SIZE for run in range(count)]


def add_runs_(sums: Tensor, signed: Tensor, places: Sequence[int]) -> None:
    """One operation a run: on a CPU the faster of the two."""
    for run, place in zip(signed.split(SIZE), places, strict=True):
        sums[place : place + run.numel()] += run


def add_elements_(sums: Tensor, signed: Tensor, places: Sequence[int]) -> None:
    """All elements in one operation."""
    firsts = torch.tensor(places, device=sums.device).repeat_interleave(SIZE)[: signed.numel()]
    within = torch.arange(signed.numel(), device=sums.device).remainder_(SIZE)
    sums.index_add_(0, firsts + within, signed.to(sums.dtype))
