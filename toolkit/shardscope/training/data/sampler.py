"""Which rows make up the global batch of each step, and which of those are a rank's own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardscope.errors import DataError


class GlobalSampler:
    """The rows of every step's global batch: the same on every rank, at any world size.

    Each epoch visits the rows in a new order, made from the seed and the epoch's number alone, so any step
    can be asked for at once, as after a restart. Rows left over at the end of an epoch are dropped.

    Args:
        num_samples: Rows to choose from.
        global_size: Rows of a step, over all ranks.
        seed: Not negative.

    Raises:
        DataError: There are fewer rows than one global batch.

    Example:
        >>> sampler = GlobalSampler(10, 4, seed=0)
        >>> sampler.steps_per_epoch, sampler.indices(7).shape
        (2, torch.Size([4]))
    """

    def __init__(self, num_samples: int, global_size: int, seed: int) -> None:
        if not 1 <= global_size <= num_samples:
            raise DataError(
                f"global_size={global_size} does not fit the data's {num_samples} rows; "
                f"use a size from 1 to {num_samples}"
            )
        self.num_samples = num_samples
        self.global_size = global_size
        self.seed = seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return self.num_samples // self.global_size

    def indices(self, step: int) -> Tensor:
        """Rows of the global batch of `step`, which counts from 0: int64, `(global_size,)`."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_size
        return self._order_of(epoch)[start : start + self.global_size]

    def _order_of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            seeds = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
            order = np.random.default_rng(seeds).permutation(self.num_samples)
            self._epoch, self._order = epoch, torch.from_numpy(order)
        return self._order


def shard(indices: Tensor, rank: int, world_size: int) -> Tensor:
    """The contiguous part of a global batch that is `rank`'s own; the parts together are the batch, in order.

    Where the batch does not divide evenly, the first ranks have one row more.

    Example:
        >>> shard(torch.arange(8), rank=1, world_size=4)
        tensor([2, 3])
    """
    return indices.tensor_split(world_size)[rank]
