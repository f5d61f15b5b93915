"""Collectives of tensors on GPUs, for ranks that share a GPU.

DeviceSlots             through slots in the GPU's memory
StagedCollectives       through CPU memory: ranks take turns on a GPU, which costs more than copying a small tensor
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.transports.cuda_ipc.memory import DeviceMemory, open_or_share
from shardscope.training.transports.shm.barriers import Barrier
from shardscope.training.transports.shm.collectives import Collectives, Reduce, Slots
from shardscope.training.transports.shm.peers import Peers

STAGED_BYTES = 1 << 20
"""Maximum size of a tensor that ranks sharing a GPU copy through CPU memory, in bytes, for each turn on the GPU that
this avoids. On an H100 with 4 ranks, a turn takes about as long as copying 1 MB."""
_SLOT_BYTES = 16 << 20


class DeviceSlots(Slots):
    """The collectives of one group, for tensors on the device; see `Slots`. All ranks must create theirs.

    Before each barrier, each rank waits on the host until the device has completed its copies and sums of the phase.
    Each rank allocates two slots, and rank 0 also two buffers of the same size for results.

    Args:
        peers: The ranks of the group.
        barrier: The group's barriers.
        timeout_s: Time after which a rank that waits for another fails, in seconds.
        memory: The device's memory.
        store: A store of the group, through which ranks exchange the handles to open each other's memory.
        slot_bytes: Size of each slot, in bytes.
    """

    small_bytes = STAGED_BYTES

    def __init__(
        self,
        peers: Peers,
        barrier: Barrier,
        timeout_s: float,
        *,
        memory: DeviceMemory,
        store: dist.Store,
        slot_bytes: int = _SLOT_BYTES,
    ) -> None:
        self._memory = memory
        slots = [
            open_or_share(memory, store, peers, rank, 2 * slot_bytes) for rank in range(peers.world_size)
        ]
        results = open_or_share(memory, dist.PrefixStore("results", store), peers, 0, 2 * slot_bytes)
        sets = [
            [part[parity * slot_bytes :][:slot_bytes] for part in (*slots, results)] for parity in range(2)
        ]
        super().__init__(peers, barrier, timeout_s, sets)

    def _wait_for_all(self, purpose: str) -> None:
        self._memory.synchronize()
        super()._wait_for_all(purpose)

    def _move(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def _add(self, parts: Sequence[Tensor], into: Tensor, reduce: Reduce) -> None:
        here = parts[self.rank].device
        total = into if into.device == here else torch.empty_like(parts[self.rank])
        super()._add([part.to(here) for part in parts], total, reduce)
        if total is not into:
            into.copy_(total)


class StagedCollectives:
    """Collectives of tensors on a device, which are copied to CPU memory for the collectives of `inner`."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner

    def all_reduce_(self, flat: Tensor, reduce: Reduce = torch.add) -> None:
        staged = flat.cpu()
        self._inner.all_reduce_(staged, reduce)
        flat.copy_(staged)

    def broadcast_(self, flat: Tensor, root: int) -> None:
        staged = flat.cpu()
        self._inner.broadcast_(staged, root)
        flat.copy_(staged)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduce: Reduce = torch.add) -> None:
        staged = torch.cat([*inputs]).cpu().split([chunk.numel() for chunk in inputs])
        total = torch.empty_like(output, device="cpu")
        self._inner.reduce_scatter(total, staged, reduce)
        output.copy_(total)

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        staged = torch.empty(len(outputs), own.numel(), dtype=own.dtype)
        self._inner.all_gather(list(staged), own.cpu())
        for output, row in zip(outputs, staged.to(own.device), strict=True):
            output.copy_(row)
