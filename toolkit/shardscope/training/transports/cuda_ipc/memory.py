"""Memory of a device that the processes of one host share, and each rank's arena of it for outgoing messages."""

from __future__ import annotations

import json
from bisect import insort
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.transports.shm.files import exchange
from shardscope.training.transports.shm.memory import CannotShare
from shardscope.training.transports.shm.peers import Peers

SEGMENT_BYTES = 64 << 20
_ALIGNMENT = 512


class DeviceMemory(Protocol):
    """Memory of a device that the processes of one host can share."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a new uint8 tensor that can be shared."""

    def export(self, segment: Tensor) -> str:
        """Return a handle, as text, with which one other process can open a tensor from `allocate`."""

    def open(self, exported: str) -> Tensor:
        """Open the memory that another process has exported."""

    def synchronize(self, *, all_streams: bool = False) -> None:
        """Wait until all copies on this thread's stream are done; with `all_streams`, all copies of this process."""


class CudaMemory:
    """Memory of a GPU, shared by CUDA IPC."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def export(self, segment: Tensor) -> str:
        shared = segment.untyped_storage()._share_cuda_()
        return json.dumps([part.hex() if isinstance(part, bytes) else part for part in shared])

    def open(self, exported: str) -> Tensor:
        parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(exported)]
        storage = torch.UntypedStorage._new_shared_cuda(*parts)  # noqa: SLF001 - as torch.multiprocessing does
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def synchronize(self, *, all_streams: bool = False) -> None:
        if all_streams:
            torch.cuda.synchronize(self._device)
        else:
            torch.cuda.current_stream(self._device).synchronize()


class Arena:
    """The memory for a rank's outgoing messages; grows by segments when it is full.

    Args:
        memory: The device's memory.
        segment_bytes: Minimum size of a segment, in bytes.
    """

    def __init__(self, memory: DeviceMemory, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._memory, self._segment_bytes = memory, segment_bytes
        self.segments: list[Tensor] = []
        self._free: list[
            tuple[int, int, int]
        ] = []  # segment, start and size of each free range, in their order

    def take(self, num_bytes: int) -> tuple[int, int, int]:
        """Return the segment, the start and the size of a range of at least `num_bytes` bytes."""
        size = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
        for at, (segment, start, room) in enumerate(self._free):
            if room >= size:
                self._free[at : at + 1] = [(segment, start + size, room - size)] if room > size else []
                return segment, start, size
        self.segments.append(self._memory.allocate(max(size, self._segment_bytes)))
        insort(self._free, (len(self.segments) - 1, 0, self.segments[-1].numel()))
        return self.take(num_bytes)

    def give_back(self, taken: tuple[int, int, int]) -> None:
        """Free a range, and merge it with adjacent free ranges."""
        insort(self._free, taken)
        merged: list[tuple[int, int, int]] = []
        for segment, start, size in self._free:
            if merged and merged[-1][0] == segment and sum(merged[-1][1:]) == start:
                merged[-1] = (segment, merged[-1][1], merged[-1][2] + size)
            else:
                merged.append((segment, start, size))
        self._free = merged


def check_sharing(memory: DeviceMemory, store: dist.Store, rank: int, world_size: int) -> None:
    """Check that each rank can open memory of the previous rank, and read what that rank has written there.

    Raises:
        CannotShare: A rank could not open or read the memory; all ranks raise this.
    """
    refusal, exported = "", ""
    try:
        written = memory.allocate(_ALIGNMENT)
        written.fill_(1 + rank % 255)
        memory.synchronize()
        exported = memory.export(written)
    except RuntimeError as error:
        refusal = str(error)
    texts = exchange(dist.PrefixStore("exported", store), rank, world_size, exported)
    previous, opened = (rank - 1) % world_size, None
    try:
        if texts[previous]:
            opened = memory.open(texts[previous])
            if opened[:_ALIGNMENT].tolist() != [1 + previous % 255] * _ALIGNMENT:
                refusal = refusal or "it opened other memory"
    except RuntimeError as error:
        refusal = refusal or str(error)
    said = exchange(dist.PrefixStore("refusals", store), rank, world_size, refusal)
    del opened  # before the rank that has allocated it
    exchange(dist.PrefixStore("closed", store), rank, world_size, "")
    for r, text in enumerate(said):
        if text:
            first_line = text.splitlines()[0]
            raise CannotShare(f"the ranks cannot open each other's GPU memory (rank {r}: {first_line})")


def open_or_share(
    memory: DeviceMemory, store: dist.Store, peers: Peers, owner: int, num_bytes: int
) -> Tensor:
    """Return memory of rank `owner`, which allocates it and lets each other rank open it."""
    if peers.rank != owner:
        try:
            exported = store.get(f"{owner}/{peers.rank}").decode()
        except dist.DistStoreError as error:
            raise dist.DistBackendError(
                f"Connection closed by peer: rank {owner} has shared no GPU memory ({error})"
            ) from error
        return memory.open(exported)
    shared = memory.allocate(num_bytes)
    memory.synchronize()
    for other in range(peers.world_size):
        if other != owner:  # what is exported can be opened once
            store.set(f"{owner}/{other}", memory.export(shared))
    return shared
