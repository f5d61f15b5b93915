"""A process group whose ranks are on one host and communicate through shared memory.

    SharedMemory        memory that all ranks have opened, with the positions in `SharedMemoryLayout`
    Peers               which ranks still take part; bells that wake a rank
    Mailbox             messages, through one pipe for each pair of ranks
    Slots               collectives, through slots and barriers
    CollectiveThread    runs asynchronous collectives in their order

A group has 10 MiB of memory with 2 ranks, 34 MiB with 4, and at most 40 MiB with more; only pages that have been used
take up space. Each sub-group has its own memory.

Collectives without an implementation here (gather, scatter, all-to-all, reduce, and reductions such as bitwise ones) go
through gloo, as do tensors that are not in CPU memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.transports.shm.barriers import Barrier
from shardscope.training.transports.shm.collectives import Collectives, RamSlots, Reduce
from shardscope.training.transports.shm.layout import SharedMemoryLayout
from shardscope.training.transports.shm.memory import SharedMemory
from shardscope.training.transports.shm.messages import ANY, Addition, Mailbox
from shardscope.training.transports.shm.peers import Peers
from shardscope.training.transports.shm.works import CollectiveThread, CollectiveWork

_REDUCTIONS: dict[Any, Reduce] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
_COUNTABLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)
"""The dtypes that gloo reduces; it rejects other dtypes with a clear error."""


class SharedMemoryGroup:
    """Process group over shared memory; methods that are not defined here are those of a TCP group of the same ranks.

    Args:
        tcp: The TCP group.
        store: The group's store.
        timeout: Time after which a rank that waits for another fails.

    Raises:
        CannotShare: The ranks are not on one host, or cannot open the same memory; all ranks raise it.
    """

    def __init__(self, tcp: dist.ProcessGroup, store: dist.Store, timeout: timedelta) -> None:
        self._tcp = tcp
        rank, layout = tcp.rank(), SharedMemoryLayout(tcp.size())
        memory = SharedMemory(store, rank, layout.world_size, layout.size)
        global_rank = dist.get_rank() if dist.is_initialized() else rank
        self._peers = Peers(memory, layout, store, rank, global_rank)
        self._mailbox = Mailbox(self._peers, timeout.total_seconds())
        self._barrier, self._timeout_s = Barrier(self._peers), timeout.total_seconds()
        self._in_ram = RamSlots(self._peers, self._barrier, self._timeout_s, layout)
        self._thread = CollectiveThread()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tcp, name)

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self._tcp._get_backend(device)

    def rank(self) -> int:
        """Return this rank within the group."""
        return self._peers.rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._peers.world_size

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time after which a rank that waits for another fails."""
        self._mailbox.timeout_s = self._in_ram.timeout_s = timeout.total_seconds()
        self._tcp.set_timeout(timeout)

    # Messages.

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        if not _is_strided_on_cpu(tensor):
            return self._tcp.send(tensors, dst, tag)
        return self._mailbox.send(tensor, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        if not _is_strided_on_cpu(tensor):
            return self._tcp.recv(tensors, src, tag)
        return self._mailbox.receive(tensor, src, tag)

    def recv_add(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Receive a message from rank `src`, and add it to the only tensor in `tensors`.

        The tensor is contiguous, in CPU memory, and as large as the message.
        """
        (tensor,) = tensors
        return self._mailbox.receive(tensor, src, tag, kind=Addition)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        (tensor,) = tensors
        return self._mailbox.receive(tensor, ANY, tag)

    # Collectives.

    def _collectives_of(self, tensors: Sequence[Tensor]) -> Collectives | None:
        """Return the shared-memory collectives if they support these tensors; None if the TCP group must run them."""
        return self._in_ram if all(map(_is_strided_on_cpu, tensors)) else None

    def _sums(self, operation: Any, tensors: Sequence[Tensor]) -> tuple[Collectives, Reduce] | None:
        """Return the shared-memory collectives and the reduction; None if the TCP group must reduce these tensors."""
        by = self._collectives_of(tensors)
        if by is None or any(tensor.dtype not in _COUNTABLE for tensor in tensors):
            return None
        return next(((by, reduce) for known, reduce in _REDUCTIONS.items() if operation == known), None)

    def _submit(self, by: Collectives, run: Callable[[], None], result: Any, options: Any) -> dist.Work:  # noqa: ARG002 - for GPUs
        """Run a collective by `by`, after the collectives that were called earlier."""
        return self._thread.submit(CollectiveWork(run, result), is_async=getattr(options, "asyncOp", True))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        return self._summed(tensors, opts) or self._tcp.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._summed(tensors, opts) or self._tcp.allreduce_coalesced(tensors, opts)

    def _summed(self, tensors: list[Tensor], opts: Any) -> dist.Work | None:
        """Reduce tensors in one collective; return None if the TCP group must run it."""
        sums = self._sums(opts.reduceOp, tensors)
        if sums is None:
            return None
        by, reduce = sums

        def run() -> None:
            for tensor in tensors:
                with _Flat(tensor) as flat:
                    by.all_reduce_(flat, reduce)

        return self._submit(by, run, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.BroadcastOptions()
        by = self._collectives_of(tensors)
        if by is None:
            return self._tcp.broadcast(tensors, opts)
        tensor = tensors[opts.rootTensor]

        def run() -> None:
            with _Flat(tensor) as flat:
                by.broadcast_(flat, opts.rootRank)

        return self._submit(by, run, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (rows,), (own,) = outputs, inputs
        by = self._collectives_of([*rows, own])
        if by is None:
            return self._tcp.allgather(outputs, inputs, *_given(opts))
        return self._submit(by, lambda: _all_gather(by, rows, own), outputs, opts)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        by = self._collectives_of([output, own])
        if by is None:
            return self._tcp._allgather_base(output, own, *_given(opts))
        rows = _rows(output, self._peers.world_size)
        return self._submit(by, lambda: _all_gather(by, rows, own), [output], opts)

    all_gather_single = _allgather_base

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        (output,), (chunks,) = outputs, inputs
        sums = self._sums(opts.reduceOp, [output, *chunks])
        if sums is None:
            return self._tcp.reduce_scatter(outputs, inputs, opts)
        return self._submit(sums[0], lambda: _reduce_scatter(*sums, output, chunks), outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        sums = self._sums(opts.reduceOp, [output, whole])
        if sums is None:
            return self._tcp._reduce_scatter_base(output, whole, opts)
        chunks = _rows(whole.contiguous(), self._peers.world_size)
        return self._submit(sums[0], lambda: _reduce_scatter(*sums, output, chunks), [output], opts)

    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, opts: Any = None) -> dist.Work:
        timeout = opts.timeout if opts is not None and opts.timeout > timedelta(0) else None
        return self._submit(self._in_ram, lambda: self._in_ram.barrier(timeout), [], opts)

    # Ending.

    def shutdown(self) -> None:
        """Leave the group, and release all resources; ranks that still wait for this rank get an error."""
        if not self._peers.is_closed:
            self._peers.close()
        self._thread.close()
        self._mailbox.close()
        self._peers.memory.close()
        self._tcp.shutdown()

    def abort(self) -> None:
        """Leave the group: all waits of this rank, and of other ranks for this rank, end with an error."""
        self._peers.close()
        self._tcp.abort()


class _Flat:
    """A tensor's elements in one row: a view of the tensor if possible, and otherwise a copy that is copied back."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.flat = self._tensor.contiguous().view(-1)

    def copy_back(self) -> None:
        """Copy the elements to the tensor if they are not a view of it."""
        if not self._tensor.is_contiguous():
            self._tensor.copy_(self.flat.view(self._tensor.shape))

    def __enter__(self) -> Tensor:
        return self.flat

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.copy_back()


def _rows(tensor: Tensor, world_size: int) -> list[Tensor]:
    """Return one row of equal size per rank; `view(world_size, -1)` refuses tensors without elements."""
    return list(tensor.detach().view(world_size, tensor.numel() // world_size))


def _is_strided_on_cpu(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout == torch.strided


def _all_gather(by: Collectives, rows: Sequence[Tensor], own: Tensor) -> None:
    flats = [_Flat(row) for row in rows]
    by.all_gather([row.flat for row in flats], _Flat(own).flat)
    for row in flats:
        row.copy_back()


def _reduce_scatter(by: Collectives, reduce: Reduce, output: Tensor, chunks: Sequence[Tensor]) -> None:
    with _Flat(output) as flat:
        by.reduce_scatter(flat, [_Flat(chunk).flat for chunk in chunks], reduce)


def _given(options: Any) -> tuple[Any, ...]:
    return () if options is None else (options,)
