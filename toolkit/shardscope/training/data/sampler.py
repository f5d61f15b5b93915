"""Which rows make up the global batch of each step, and which of those are a rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardscope.errors import DataError


class Origin(NamedTuple):
    """Where counting begins: before `step` (from 0), at `row` of the order of `epoch`, after `samples` samples."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    samples: int = 0


class GlobalSampler:
    """The rows of every step's global batch: the same on every rank, at any world size.

    Each epoch visits the rows in a new order, made from the seed and the epoch's number alone, so any step
    can be asked for at once, as after a restart. Rows left over at the end of an epoch are dropped. A run that goes
    on with another `global_batch` goes on at the row that the one before had come to (`go_on`).

    Args:
        num_samples: Rows to choose from.
        global_batch: Rows of a step, over all ranks.
        seed: Not negative.

    Raises:
        DataError: There are fewer rows than one global batch.

    Example:
        >>> sampler = GlobalSampler(10, 4, seed=0)
        >>> sampler.steps_per_epoch, sampler.indices(7).shape
        (2, torch.Size([4]))
    """

    def __init__(self, num_samples: int, global_batch: int, seed: int) -> None:
        if not 1 <= global_batch <= num_samples:
            raise DataError(
                f"global_batch={global_batch} does not fit the data's {num_samples} rows; "
                f"use a size from 1 to {num_samples}"
            )
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.seed = seed
        self.origin = Origin()
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return self.num_samples // self.global_batch

    def indices(self, step: int) -> Tensor:
        """Rows of the global batch of `step`, which counts from 0: int64, `(global_batch,)`."""
        epoch, start = self._place_of(step)
        return self._order_of(epoch)[start : start + self.global_batch]

    def samples_before(self, step: int) -> int:
        """Rows that all steps before `step` have taken."""
        return self.origin.samples + (step - self.origin.step) * self.global_batch

    def state_dict(self) -> dict[str, int]:
        """What `go_on` needs, for a checkpoint; its keys are those of every checkpoint so far."""
        return {"global_size": self.global_batch, **self.origin._asdict()}

    def go_on(self, step: int, state: Mapping[str, int]) -> None:
        """Count on from before `step`, where another sampler of the same rows, of this `state_dict`, had come to."""
        earlier = GlobalSampler(self.num_samples, state["global_size"], self.seed)
        earlier.origin = Origin(*(state[name] for name in Origin._fields))
        same = earlier.global_batch == self.global_batch
        self.origin = earlier.origin if same else earlier._origin_at(step)

    def _origin_at(self, step: int) -> Origin:
        return Origin(step, *self._place_of(step), self.samples_before(step))

    def _place_of(self, step: int) -> tuple[int, int]:
        """Epoch and first row of a step."""
        since = step - self.origin.step
        assert since >= 0, "before where this run goes on from"
        left = (self.num_samples - self.origin.row) // self.global_batch  # in the epoch it begins in
        if since < left:
            return self.origin.epoch, self.origin.row + since * self.global_batch
        epochs, position = divmod(since - left, self.steps_per_epoch)
        return self.origin.epoch + 1 + epochs, position * self.global_batch

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
