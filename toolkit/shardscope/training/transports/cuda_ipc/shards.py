"""Buffers in the memory of a GPU that all ranks share, for the shards of one model; see `ShardBuffers`.

The barriers and digests stay in shared CPU memory. Before each barrier, a rank waits until the GPU has completed all of
the rank's operations.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from shardscope.spec.shard_buffers import SETS, Limits
from shardscope.training.transports.cuda_ipc.memory import DeviceMemory, open_or_share
from shardscope.training.transports.shm.shards import ShardBuffers


class DeviceShardBuffers(ShardBuffers):
    """The shared buffers of one model on a GPU; all ranks must create them.

    Ranks that share a GPU take turns on it. A turn costs more than the copies, so many tensors share one barrier.

    Args:
        store: A store for these buffers alone.
        rank: This rank.
        world_size: Number of ranks.
        memory: The GPU's memory.
        options: The other arguments of `ShardBuffers`.
    """

    limits: ClassVar = Limits(gathered=256 << 20, reduced=512 << 20, together=32 << 20)

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, *, memory: DeviceMemory, **options: Any
    ) -> None:
        self._device_memory, self._store = memory, store
        super().__init__(store, rank, world_size, **options)

    @property
    def _shared_bytes(self) -> int:
        return self._layout.gathered_start(0)

    def _open_buffers(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        sizes, memory = self._sizes, self._device_memory
        whole = dist.PrefixStore("gathered", self._store)
        parts = dist.PrefixStore("reduced", self._store)
        gathered = open_or_share(memory, whole, self._peers, 0, SETS * sizes.gathered_bytes)
        reduced = [
            open_or_share(memory, parts, self._peers, r, sizes.own_bytes) for r in range(self.world_size)
        ]
        return _halves(gathered), [list(pair) for pair in zip(*map(_halves, reduced), strict=True)]

    def meet(self, digest: int, purpose: str) -> None:
        self._device_memory.synchronize(all_streams=True)  # FSDP2 writes and reads on several
        super().meet(digest, purpose)


def _halves(tensor: Tensor) -> list[Tensor]:
    return list(tensor.chunk(2))
