"""Random choice of k of n elements without replacement, in ascending order up to a rotation, in O(k) time.

Shuffling n numbers to keep k of them costs 150 times a copy of the gradient at 25 million. Here the n indices are cut
into k strata that are as even as whole numbers allow. One index is drawn from each, and all are rotated by a common
offset. With the offset, every index is drawn with a probability of exactly k/n, however uneven the strata.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@lru_cache(maxsize=2)  # packing, unpacking and summing request the same draw one after another
def draw(num_elements: int, count: int, seed: int) -> Tensor:
    """Draw `count` distinct indices below `num_elements`, int64; the same for the same seed on every machine.

    Example:
        >>> sorted(draw(5, 5, seed=1).tolist())
        [0, 1, 2, 3, 4]
    """
    if not count:
        return torch.empty(0, dtype=torch.int64)
    edges = np.arange(count + 1, dtype=np.int64) * num_elements // count
    sizes = np.diff(edges).astype(np.uint64)
    numbers = _hashed(count + 1, seed)
    offset = int(numbers[-1] % np.uint64(num_elements))
    places = edges[:-1] + (numbers[:-1] % sizes).astype(np.int64) + offset
    return torch.from_numpy(np.where(places >= num_elements, places - num_elements, places))


def _hashed(count: int, seed: int) -> npt.NDArray[np.uint64]:
    """Pseudo-random numbers: splitmix64 (Steele, Lea and Flood 2014), started at a hash of the seed."""
    start = np.uint64((seed * 0xBF58476D1CE4E5B9 + _GOLDEN) & _MASK)
    z = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)
