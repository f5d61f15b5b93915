"""Collectives through slots in memory that all ranks share.

A tensor is cut into pieces of the size of a slot; in CPU memory, pieces fit into the processor's caches. Barriers
divide the work of a group into phases. In each phase, a rank writes to one of two sets of slots and results,
alternately; the data written in one phase are read in the next phase, and overwritten in the phase after that. So one
barrier per phase is enough for any sequence of collectives.

    all-reduce          phase k: write piece k to its own slot; sum its own share of piece k-1 over all slots into
                        the results; copy piece k-2 from the results; its own share needs no copies
    small all-reduce    write the tensor to its own slot; after one barrier, each rank sums the whole tensor
    reduce-scatter      write a piece of every rank's chunk to its own slot; sum its own chunk over all slots
    all-gather          write a piece to its own slot; copy the other ranks' pieces from their slots
    broadcast           the root writes a piece to its slot; the other ranks copy it

All sums are in the order of the ranks: ((x0 + x1) + x2) + x3, so the results are bitwise identical on all ranks, and do
not depend on the size of pieces.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shardscope.training.transports.shm.barriers import Barrier
from shardscope.training.transports.shm.layout import SharedMemoryLayout
from shardscope.training.transports.shm.memory import address_of
from shardscope.training.transports.shm.peers import Peers

Reduce = Callable[..., Tensor]
"""An element-wise operation of two tensors with `out`, such as `torch.add`."""


class Collectives(Protocol):
    """The collectives of one group; all ranks must call the same methods in the same order, with tensors of equal size.

    Tensors are flat and contiguous.
    """

    def all_reduce_(self, flat: Tensor, reduce: Reduce) -> None:
        """Replace `flat` with the sum over all ranks, or with another reduction."""

    def broadcast_(self, flat: Tensor, root: int) -> None:
        """Replace `flat` with the tensor of rank `root`."""

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduce: Reduce) -> None:
        """Write the sum of this rank's chunk over all ranks to `output`.

        Args:
            output: This rank's chunk of the sum.
            inputs: This rank's chunks, one for each rank, each of the size of `output`.
            reduce: The reduction.
        """

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        """Copy each rank's tensor to the entry of `outputs` for that rank; all have the same size."""


class Slots(ABC):
    """Collectives through slots, of tensors in the same kind of memory as the slots.

    Args:
        peers: The ranks of the group.
        barrier: The group's barriers.
        timeout_s: Time after which a rank that waits for another fails, in seconds.
        sets: The two sets of slots, each with the slots of all ranks followed by the results, as uint8 tensors.
    """

    small_bytes: ClassVar[int]
    """Maximum size of a tensor that each rank sums as a whole, in bytes; below it, a barrier costs more than the
    sum."""

    def __init__(
        self, peers: Peers, barrier: Barrier, timeout_s: float, sets: Sequence[Sequence[Tensor]]
    ) -> None:
        self.rank, self.world_size, self.timeout_s = peers.rank, peers.world_size, timeout_s
        self._barrier, self.slot_bytes = barrier, sets[0][0].numel()
        self._typed: dict[torch.dtype, Sequence[Sequence[Tensor]]] = {torch.uint8: sets}

    @abstractmethod
    def _move(self, into: Tensor, source: Tensor) -> None:
        """Copy a contiguous tensor to one of the same size and dtype."""

    def _copy(self, into: Tensor, source: Tensor) -> None:
        if into.nbytes != source.nbytes:
            raise ValueError(
                f"a collective got tensors of {source.nbytes} and {into.nbytes} bytes; give it tensors of the same size"
            )
        self._move(into, source)

    def _slots(self, dtype: torch.dtype, phase: int) -> Sequence[Tensor]:
        """Return the slots of all ranks in a phase, followed by the results, as tensors of a dtype."""
        if dtype not in self._typed:
            sets = self._typed[torch.uint8]
            self._typed[dtype] = [[slot.view(dtype) for slot in slots] for slots in sets]
        return self._typed[dtype][phase % 2]

    @property
    def _phase(self) -> int:
        return self._barrier.number

    def _wait_for_all(self, purpose: str) -> None:
        self._barrier.wait(self.timeout_s, purpose)

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Wait until all ranks have called this, for at most `timeout`; None for the group's timeout."""
        self._barrier.wait(self.timeout_s if timeout is None else timeout.total_seconds(), "a barrier")

    # Sums.

    def all_reduce_(self, flat: Tensor, reduce: Reduce = torch.add) -> None:
        size = flat.numel() * flat.element_size()
        if not size:
            return
        if size <= min(self.small_bytes, self.slot_bytes):
            self._reduce_small(flat, reduce)
            return
        pieces = flat.split(self.slot_bytes // flat.element_size())
        for k in range(len(pieces) + 2):
            if k:
                self._wait_for_all("an all-reduce")
            if k < len(pieces):
                self._write_others(pieces[k])
            if 1 <= k <= len(pieces):
                self._add_share(pieces[k - 1], reduce)
            if k >= 2:
                self._copy_others(pieces[k - 2])

    def _reduce_small(self, flat: Tensor, reduce: Reduce) -> None:
        count = flat.numel()
        slots = self._slots(flat.dtype, self._phase)
        self._copy(slots[self.rank][:count], flat)
        self._wait_for_all("an all-reduce")
        self._add([slot[:count] for slot in slots[:-1]], flat, reduce)

    def _share(self, piece: Tensor) -> slice:
        """Return the part of a piece that this rank sums."""
        each = -(-piece.numel() // self.world_size)
        return slice(min(piece.numel(), each * self.rank), min(piece.numel(), each * (self.rank + 1)))

    def _others(self, piece: Tensor) -> Iterator[slice]:
        """Yield the parts of a piece that other ranks sum."""
        own = self._share(piece)
        for part in (slice(0, own.start), slice(own.stop, piece.numel())):
            if part.start < part.stop:
                yield part

    def _write_others(self, piece: Tensor) -> None:
        slot = self._slots(piece.dtype, self._phase)[self.rank]
        for part in self._others(piece):
            self._copy(slot[part], piece[part])

    def _add_share(self, piece: Tensor, reduce: Reduce) -> None:
        """Sum this rank's share of a piece that was written in the previous phase, into the results of this phase."""
        share = self._share(piece)
        if share.start == share.stop:
            return
        own, total = piece[share], self._slots(piece.dtype, self._phase)[-1][share]
        parts = [slot[share] for slot in self._slots(piece.dtype, self._phase - 1)[:-1]]
        parts[self.rank] = own
        self._add(parts, total, reduce)
        self._copy(own, total)

    def _copy_others(self, piece: Tensor) -> None:
        results = self._slots(piece.dtype, self._phase - 1)[-1]
        for part in self._others(piece):
            self._copy(piece[part], results[part])

    def _add(self, parts: Sequence[Tensor], into: Tensor, reduce: Reduce) -> None:
        """Reduce `parts` in their order; `into` may be the first part, but no other."""
        reduce(parts[0], parts[1], out=into)
        for part in parts[2:]:
            reduce(into, part, out=into)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduce: Reduce = torch.add) -> None:
        width = self.slot_bytes // output.element_size() // self.world_size
        pieces = output.split(width) if output.numel() else ()
        columns = list(zip(*(chunk.split(width) for chunk in inputs), strict=True)) if output.numel() else []
        for k in range(len(pieces) + 1):
            if k:
                self._wait_for_all("a reduce-scatter")
            if k < len(pieces):
                self._write_row(columns[k], width)
            if k:
                self._add_row(pieces[k - 1], columns[k - 1][self.rank], width, reduce)

    def _write_row(self, chunks: Sequence[Tensor], width: int) -> None:
        slot = self._slots(chunks[0].dtype, self._phase)[self.rank]
        for r, chunk in enumerate(chunks):
            if r != self.rank:
                self._copy(slot[r * width : r * width + chunk.numel()], chunk)

    def _add_row(self, output: Tensor, own: Tensor, width: int, reduce: Reduce) -> None:
        place = slice(self.rank * width, self.rank * width + output.numel())
        parts = [slot[place] for slot in self._slots(output.dtype, self._phase - 1)[:-1]]
        parts[self.rank] = own
        total = self._slots(output.dtype, self._phase)[-1][place]  # `output` may be a view of an input
        self._add(parts, total, reduce)
        self._copy(output, total)

    # Copies.

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        width = self.slot_bytes // own.element_size()
        pieces = own.split(width) if own.numel() else ()
        rows = [output.split(width) for output in outputs]
        for k in range(len(pieces) + 1):
            if k:
                self._wait_for_all("an all-gather")
            if k < len(pieces):
                self._copy(self._slots(own.dtype, self._phase)[self.rank][: pieces[k].numel()], pieces[k])
            if k:
                slots = self._slots(own.dtype, self._phase - 1)
                for r, row in enumerate(rows):
                    source = pieces[k - 1] if r == self.rank else slots[r]
                    self._copy(row[k - 1], source[: row[k - 1].numel()])

    def broadcast_(self, flat: Tensor, root: int) -> None:
        pieces = flat.split(self.slot_bytes // flat.element_size()) if flat.numel() else ()
        for k in range(len(pieces) + 1):
            if k:
                self._wait_for_all("a broadcast")
            if k < len(pieces) and self.rank == root:
                self._copy(self._slots(flat.dtype, self._phase)[root][: pieces[k].numel()], pieces[k])
            if k and self.rank != root:
                self._copy(
                    pieces[k - 1], self._slots(flat.dtype, self._phase - 1)[root][: pieces[k - 1].numel()]
                )


class RamSlots(Slots):
    """The collectives of one group, for tensors in CPU memory.

    Args:
        peers: The ranks of the group.
        barrier: The group's barriers.
        timeout_s: Time after which a rank that waits for another fails, in seconds.
        layout: Positions within the shared memory.
    """

    small_bytes = 64 << 10

    def __init__(self, peers: Peers, barrier: Barrier, timeout_s: float, layout: SharedMemoryLayout) -> None:
        places = range(layout.world_size + 1)
        starts = [[layout.slot_start(parity, r) for r in places] for parity in range(2)]
        sets = [[peers.memory.tensor(start, layout.slot_bytes) for start in each] for each in starts]
        super().__init__(peers, barrier, timeout_s, sets)

    def _move(self, into: Tensor, source: Tensor) -> None:
        ctypes.memmove(address_of(into), address_of(source), into.nbytes)  # faster than `copy_`
