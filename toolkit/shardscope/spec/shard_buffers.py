"""Sizes of the buffers through which the ranks of a host exchange the shards of a model.

`shardscope.training.transports.shm.shards` allocates these buffers, and predictions of memory count them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LINE = 64
"""Alignment of tensors in a buffer, in bytes."""
SETS = 2
"""Number of sets of buffers: ranks write to one while others may still read the other."""
_PAGE = mmap.PAGESIZE


def whole_pages(size: int) -> int:
    """Return a size in bytes, rounded up to whole pages of memory."""
    return -(-size // _PAGE) * _PAGE


class Limits(NamedTuple):
    """Maximum sizes of the buffers of one model, in bytes; the defaults are for CPU memory."""

    gathered: int = 32 << 20
    """Maximum size of a buffer for gathered tensors."""
    reduced: int = 64 << 20
    """Maximum total size of all buffers for tensors to reduce."""
    together: int = 1 << 20
    """Maximum total size of the small tensors that share a buffer until they are reduced."""


_IN_CPU_MEMORY = Limits()


@dataclass(frozen=True)
class ShardBufferSizes:
    """Sizes of a model's buffers: each set has one for gathered tensors, and one per rank for tensors to reduce.

    Attributes:
        world_size: Number of ranks.
        units: Sizes of the tensors that are gathered or reduced in a step, in bytes.
        limits: Maximum sizes of the buffers.

    Example:
        >>> sizes = ShardBufferSizes(4, (300_000, 5_000_000))
        >>> sizes.reduced_bytes >> 10, sizes.own_bytes >> 10
        (4884, 9768)
    """

    world_size: int
    units: Sequence[int]
    limits: Limits = _IN_CPU_MEMORY

    @property
    def _largest(self) -> int:
        return max(self.units, default=0)

    @property
    def gathered_bytes(self) -> int:
        """Size, in bytes, of a buffer for gathered tensors, which all ranks share."""
        return max(LINE * self.world_size, min(whole_pages(self._largest), self.limits.gathered))

    @property
    def reduced_bytes(self) -> int:
        """Size, in bytes, of a rank's buffer for tensors to reduce; small tensors share a buffer."""
        most = self.limits.reduced // (SETS * self.world_size) // _PAGE * _PAGE
        together = min(sum(self.units) + LINE * len(self.units), self.limits.together)
        return max(LINE * self.world_size, min(whole_pages(max(self._largest, together)), most))

    @property
    def own_bytes(self) -> int:
        """Size of all buffers to which only one rank writes, in bytes; a run counts them as memory of that rank."""
        return SETS * self.reduced_bytes
