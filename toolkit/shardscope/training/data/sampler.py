"""Choice of the rows of each step's global batch, and their division among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

from torch import Tensor

from shardscope.storage.rows import require_rows
from shardscope.training.data.order import FullShuffle, RowOrder
from shardscope.training.data.shard_source import ShardSource
from shardscope.training.data.sources import DataSource
from shardscope.training.data.stream import StreamSource

_OTHER_ORDER = (
    "the shards, or the window in which they are shuffled, differ from those at the checkpoint: in this epoch, some "
    "rows may be read twice and others not at all"
)


class Origin(NamedTuple):
    """Position in the data at which a sampler starts.

    Attributes:
        step: First step, counted from 0.
        epoch: Epoch of that step.
        row: Position of that step's first row in the shuffled order of the epoch.
        samples: Number of samples used before that step.
    """

    step: int = 0
    epoch: int = 0
    row: int = 0
    samples: int = 0


class GlobalSampler:
    """Chooses the rows of every step's global batch; the choice is the same on every rank, and at any world size.

    Each epoch visits the rows in a new order, which depends only on the seed and the epoch's number: all rows are
    shuffled together or, for data in shards, the rows of a few shards at a time (see `order`). So the rows of any step
    can be computed directly, for example on resume. Rows left over at the end of an epoch are skipped. A run resumed
    with a different `global_batch` continues at the row that the earlier run had reached (`resume`).

    Args:
        num_samples: Number of rows in the data.
        global_batch: Rows per step, over all ranks.
        seed: Seed for the random orders; not negative.
        order: The order of rows in each epoch; None to shuffle all rows.

    Raises:
        DataError: `global_batch` is less than 1 or greater than `num_samples`.

    Example:
        >>> sampler = GlobalSampler(10, 4, seed=0)
        >>> sampler.steps_per_epoch, sampler.indices(7).shape
        (2, torch.Size([4]))
    """

    def __init__(
        self, num_samples: int, global_batch: int, seed: int, *, order: RowOrder | None = None
    ) -> None:
        require_rows(global_batch, num_samples)
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.seed = seed
        self.origin = Origin()
        self.order = FullShuffle(num_samples, seed) if order is None else order

    @classmethod
    def of(cls, source: DataSource, global_batch: int, seed: int) -> Self:
        """Return the sampler for a source, in the order that suits it."""
        order = source.order(seed) if isinstance(source, ShardSource | StreamSource) else None
        return cls(len(source), global_batch, seed, order=order)

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches in an epoch."""
        return self.num_samples // self.global_batch

    def indices(self, step: int) -> Tensor:
        """Return the row indices of the global batch in `step` (counted from 0): int64, `(global_batch,)`."""
        epoch, start = self.place_of(step)
        return self.order.rows(epoch, start, start + self.global_batch)

    def samples_before(self, step: int) -> int:
        """Return the total number of samples used by all steps before `step`."""
        return self.origin.samples + (step - self.origin.step) * self.global_batch

    def state_dict(self) -> dict[str, int]:
        """Return the state that a checkpoint keeps for `resume`; older checkpoints do not have ``order``."""
        told = {"global_size": self.global_batch, **self.origin._asdict()}
        return {**told, "order": self.order.identity} if self.order.identity else told

    def resume(self, step: int, state: Mapping[str, int]) -> list[str]:
        """Continue where the sampler of an earlier run stopped, and return notes for the user.

        Args:
            step: The first step of this run, counted from 0.
            state: The `state_dict` of the earlier sampler, which had the same rows and seed; its `global_batch` may
                differ.
        """
        earlier = GlobalSampler(self.num_samples, state["global_size"], self.seed, order=self.order)
        earlier.origin = Origin(*(state[name] for name in Origin._fields))
        same = earlier.global_batch == self.global_batch
        self.origin = earlier.origin if same else earlier._origin_at(step)
        if state.get("order", 0) == self.order.identity:
            return []
        return [_OTHER_ORDER]

    def _origin_at(self, step: int) -> Origin:
        return Origin(step, *self.place_of(step), self.samples_before(step))

    def place_of(self, step: int) -> tuple[int, int]:
        """Return the epoch of `step`, and the position of the step's first row in that epoch's order."""
        since = step - self.origin.step
        assert since >= 0, f"step {step} is before step {self.origin.step}, at which this run starts"
        left = (self.num_samples - self.origin.row) // self.global_batch  # steps left in the origin's epoch
        if since < left:
            return self.origin.epoch, self.origin.row + since * self.global_batch
        epochs, position = divmod(since - left, self.steps_per_epoch)
        return self.origin.epoch + 1 + epochs, position * self.global_batch


def shard(indices: Tensor, rank: int, world_size: int) -> Tensor:
    """Return the contiguous part of a global batch for `rank`; concatenated in rank order, the parts are the batch.

    If the batch size is not a multiple of `world_size`, the first ranks get one row more than later ranks.

    Example:
        >>> import torch
        >>> shard(torch.arange(8), rank=1, world_size=4)
        tensor([2, 3])
    """
    return indices.tensor_split(world_size)[rank]
