"""Process group for all communication: it forwards each collective to a transport, and records bytes and time.

`MeteredProcessGroup` is a `torch.distributed.ProcessGroup`, so `DistributedDataParallel`, FSDP2, pipelines and the
user's own calls to `dist.all_reduce` all use it. `init` registers it as a backend and makes it the default group.

For the backend's collectives (such as all-reduce), the number of bytes sent is computed from the backend's algorithm.
`_TOTAL_SENT` determines the total over all ranks, and each rank records an equal share of it. A test compares these
totals with the kernel's TCP counters. The recorded bytes follow from the algorithm, whatever the transport: even over
shared memory, a collective counts as the backend's, so that a job's traffic, its predictions and its times on an
emulated link do not depend on the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from shardscope.spec import Link
from shardscope.training import clock
from shardscope.training.collectives.plain_tensors import Copies, copied_back, plain, with_rows
from shardscope.training.collectives.start import store_of_this_start
from shardscope.training.meter import Meter, Span, Traffic
from shardscope.training.transports import Name, Route, open_route

if TYPE_CHECKING:
    from shardscope.training.collectives.paced_group import PacedGroups

BACKEND = "shardscope"


def share(total: int, rank: int, world_size: int) -> int:
    """Return this rank's equal share of `total`; if there is a remainder, the lowest ranks get one more each."""
    return total // world_size + (rank < total % world_size)


def num_bytes(tensors: Any) -> int:
    """Return the size in bytes of a tensor, or the total size of nested sequences of tensors.

    A sparse tensor has the size of its indices and values, without duplicates, which is what gloo sends.
    """
    if not isinstance(tensors, torch.Tensor):
        return sum(num_bytes(tensor) for tensor in tensors)
    if tensors.layout is not torch.sparse_coo:
        return tensors.nbytes
    once = tensors.detach().coalesce()
    return once.indices().nbytes + once.values().nbytes


# Total bytes sent by all ranks, in multiples of (world_size - 1) * payload. The payload is the size of the reduced
# tensor, the gathered output or the scattered input. gloo implements reduce_scatter with an all-reduce.
_TOTAL_SENT = {"all_reduce": 2, "reduce_scatter": 1}
_TOTAL_SENT_GLOO = {**_TOTAL_SENT, "reduce_scatter": 2}


def sent_by_backend(name: str, payload: int, rank: int, world_size: int, backend: str) -> int:
    """Return this rank's share of the bytes that all ranks send in one backend collective.

    Args:
        name: The collective, such as ``"all_reduce"``.
        payload: Size of the reduced tensor, the gathered output or the scattered input, in bytes.
        rank: This rank within the group.
        world_size: Number of ranks in the group.
        backend: ``"gloo"`` or ``"nccl"``.
    """
    per_payload = _TOTAL_SENT_GLOO if backend == "gloo" else _TOTAL_SENT
    return share(per_payload.get(name, 1) * (world_size - 1) * payload, rank, world_size)


def not_sized(name: str) -> str:
    """Return the name under which calls of a collective are counted, without bytes, if their size is not known."""
    return f"{name} (not sized)"


def backend_traffic(
    name: str, payload_of: int, arguments: Sequence[Any], group: dist.ProcessGroup, backend: str
) -> Traffic:
    """Return this rank's traffic in one call of a backend collective.

    Args:
        name: The collective, such as ``"all_reduce"``.
        payload_of: Index of the argument that contains the payload: the reduced tensor, the gathered output or the
            scattered input.
        arguments: Arguments of the collective, without the group.
        group: The group.
        backend: ``"gloo"`` or ``"nccl"``.
    """
    payload = num_bytes(arguments[payload_of])
    if name == "all_to_all":
        sent, received = (_to_others(arguments, side, group.rank(), group.size()) for side in (1, 0))
    elif _is_sparse(arguments[payload_of]):  # gloo gathers the indices and values of all ranks
        sent = received = (group.size() - 1) * payload
    else:
        sent = received = sent_by_backend(name, payload, group.rank(), group.size(), backend)
    return Traffic(payload, sent, received, calls=1)


def _to_others(arguments: Sequence[Any], side: int, rank: int, world_size: int) -> int:
    """Return the bytes of all parts but the rank's own of an all-to-all's input (`side` 1) or output (`side` 0)."""
    tensors = arguments[side]
    if not isinstance(tensors, torch.Tensor):
        return num_bytes(tensors) - num_bytes(tensors[rank])
    splits = arguments[2 + side]
    if not splits:
        return num_bytes(tensors) // world_size * (world_size - 1)
    rows: int = sum(splits)
    return (rows - int(splits[rank])) * num_bytes(tensors) // max(1, rows)


def _is_sparse(tensors: Any) -> bool:
    while type(tensors) in (list, tuple) and tensors:
        tensors = tensors[0]
    return isinstance(tensors, torch.Tensor) and tensors.layout is torch.sparse_coo


Call = tuple[str, tuple[int, ...]]
"""Name of a method called on a process group, and the numbers of elements of its tensors."""


class _Answered(dist.Work):
    """Handle of a call that was recorded instead of made; already complete."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True


class _Recorder:
    """Stand-in for a transport's group: appends each call to `calls`, and sends nothing; received values are zero."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., dist.Work]:
        def call(*arguments: Any, **_: Any) -> dist.Work:
            tensors = [[t for t in tree_leaves(each) if isinstance(t, torch.Tensor)] for each in arguments]
            self._calls.append((name, tuple(t.numel() for each in tensors for t in each)))
            for received in tensors[0] if any(tensors[1:]) else ():
                received.detach().zero_()
            return _Answered()

        return call


class _WatchedWork(dist.Work):
    """Handle of a collective (`dist.Work`) that calls `finished` after a call of `wait`."""

    def __init__(self, inner: dist.Work, finished: Callable[[Any], None]) -> None:
        super().__init__()
        self._inner = inner
        self._finished = finished

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        self._finished(None)
        return done

    def is_completed(self) -> bool:
        return self._inner.is_completed()


class MeteredProcessGroup(dist.ProcessGroup):
    """Process group that records the bytes and the time of all its collectives and messages.

    Args:
        route: The transport, to whose group collectives are forwarded.
        meter: Meter that records bytes and time spans.
        backend: ``"gloo"`` or ``"nccl"``; determines how many bytes a collective sends, on every transport.
    """

    def __init__(self, route: Route, meter: Meter, backend: str) -> None:
        super().__init__(route.group.rank(), route.group.size())  # type: ignore[call-arg]
        self.route = route
        self.inner: Any = route.group
        self.meter = meter
        self.backend = backend
        self._name = "shardscope"

    def _metered(
        self, name: str, payload_of: int, arguments: Sequence[Any], call: Callable[..., dist.Work]
    ) -> dist.Work:
        """Record the traffic of a backend collective, and start it with `call(*arguments)`."""
        written: Copies = []
        may_be_sparse = name == "all_reduce"
        arguments = [  # the first is what the collective writes
            plain(each, may_be_sparse=may_be_sparse, written=None if place else written)
            for place, each in enumerate(arguments)
        ]
        counted_as = name
        try:
            traffic = backend_traffic(name, payload_of, arguments, self, self.backend)
        except Exception:  # noqa: BLE001 - the transport says what is wrong with the arguments
            counted_as, traffic = not_sized(name), Traffic(calls=1)
        self.meter.count(counted_as, traffic)
        payload = traffic.payload_bytes
        if name == "all_to_all" and self.size() > 1:
            # the payload of an even one that takes as long on a link
            payload = max(traffic.sent_bytes, traffic.received_bytes) * self.size() // (self.size() - 1)
        if name == "all_reduce":  # in a backward pass, DistributedDataParallel's
            self.meter.hold_gradients()
        return copied_back(self._timed("communication", name, payload, lambda: call(*arguments)), written)

    def _timed(
        self,
        lane: str,
        name: str,
        payload: int,
        call: Callable[[], dist.Work],
        after: Callable[[], None] = lambda: None,
    ) -> dist.Work:
        """Start a collective, record its span, and call `after` when it has finished."""
        start = self.meter.handed_over = clock.now()
        work = call()
        meter = self.meter

        def finished(_: Any) -> None:
            meter.add_span(Span(lane, name, start, clock.now(), payload))
            after()

        try:
            work.get_future().add_done_callback(finished)
        except RuntimeError:  # gloo's reduce_scatter work has no future: watch `wait` instead
            return _WatchedWork(work, finished)
        return work

    # Point-to-point messages are counted by both the sender and the receiver.

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        tensors = plain(tensors)
        size = num_bytes(tensors)
        self._count_send(dst, size)
        return self._timed("communication", "send", size, lambda: self.inner.send(tensors, dst, tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        written: Copies = []
        tensors = plain(tensors, written=written)
        size = num_bytes(tensors)
        self.meter.count("recv", Traffic(size, received_bytes=size, calls=1))
        arrived = partial(self.meter.arrived, "send", src, size)
        work = self._timed("communication", "recv", size, lambda: self.inner.recv(tensors, src, tag), arrived)
        return copied_back(work, written)

    def _count_send(self, dst: int, size: int) -> None:
        self.meter.count("send", Traffic(size, sent_bytes=size, messages=1, calls=1, sent_to={dst: size}))
        self.meter.log("send", "sent", dst, size)

    def sum_as(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place, and record the traffic under `name`."""
        written: Copies = []
        summed = plain(tensor, written=written)
        payload = num_bytes(summed)
        moved = sent_by_backend("all_reduce", payload, self.rank(), self.size(), self.backend)
        self.meter.count(name, Traffic(payload, moved, moved, calls=1))
        work = self._timed("communication", name, payload, lambda: self.inner.allreduce([summed]))
        copied_back(work, written).wait()
        return tensor

    def transport(self, device: torch.device) -> Any:
        """Return the backend that sends messages on `device` without recording them.

        Shardscope's own collectives use this backend, because they record their traffic themselves.
        """
        return self.inner._get_backend(device)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        written: Copies = []
        tensors = plain(tensors, written=written)
        size = num_bytes(tensors)
        self.meter.count("recv", Traffic(size, received_bytes=size, calls=1))
        return copied_back(self.inner.recv_anysource(tensors, tag), written)

    @contextmanager
    def recording_calls(self) -> Iterator[list[Call]]:
        """Return a context manager within which calls of this group are listed instead of sent; yields the list."""
        calls: list[Call] = []
        inner, self.inner = self.inner, _Recorder(calls)
        try:
            yield calls
        finally:
            self.inner = inner

    def give_up(self) -> None:
        """Stop delaying messages, if any are delayed; called when this rank has closed its connections."""

    def barrier(self, *args: Any, **options: Any) -> dist.Work:
        self.meter.count("barrier", Traffic(calls=1))
        return self._timed("communication", "barrier", 0, lambda: self.inner.barrier(*args, **options))

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        self.meter.count("barrier", Traffic(calls=1))
        self.inner.monitored_barrier(*args, **options)

    # Methods that PyTorch requires from a process group written in Python.

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self.inner._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self.inner._set_group_desc(desc)

    def getBackendName(self) -> str:  # noqa: N802 - torch's own name
        return BACKEND

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def shutdown(self) -> None:
        self.inner.shutdown()

    def abort(self) -> None:
        self.inner.abort()

    def get_group_store(self) -> dist.Store:
        store: dist.Store = self.inner.get_group_store()
        return store

    def _set_sequence_number_for_group(self) -> None:
        self.inner._set_sequence_number_for_group()

    def _get_sequence_number_for_group(self) -> int:
        return int(self.inner._get_sequence_number_for_group())


def _pass_on(method: str, name: str, payload_of: int) -> Callable[..., dist.Work]:
    """Return a method that records the traffic of the collective `name` and forwards to the inner group's `method`.

    Args:
        method: Name of the method of `dist.ProcessGroup`.
        name: Name under which the traffic is recorded.
        payload_of: Index of the argument that contains the payload.
    """
    by_rows = method in _BY_ROWS

    def call(self: MeteredProcessGroup, *args: Any, **options: Any) -> dist.Work:
        inner = partial(getattr(self.inner, method), **options)
        return self._metered(
            name, payload_of, args, (lambda *own: inner(*map(with_rows, own))) if by_rows else inner
        )

    call.__name__ = method
    return call


_BY_ROWS = {
    "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
}  # fmt: skip
"""Methods that split tensors into rows; gloo reads beyond the shape of a 0-dimensional tensor, and crashes."""
_COLLECTIVES = {
    "all_reduce": (0, ("allreduce", "allreduce_coalesced")),
    "broadcast": (0, ("broadcast",)),
    "reduce": (0, ("reduce",)),
    "all_gather": (
        0,
        ("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
         "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ),
    "reduce_scatter": (
        1,
        ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
         "reduce_scatter_single_coalesced"),
    ),
    "all_to_all": (1, ("alltoall", "alltoall_base", "all_to_all_single")),
    "gather": (1, ("gather",)),
    "scatter": (0, ("scatter",)),
}  # fmt: skip

for _name, (_payload_of, _methods) in _COLLECTIVES.items():
    for _method in _methods:
        if hasattr(dist.ProcessGroup, _method):
            setattr(MeteredProcessGroup, _method, _pass_on(_method, _name, _payload_of))


def _paced_groups(link: Link, *, limits_rate: bool) -> PacedGroups:
    from shardscope.training.collectives.paced_group import PacedGroups  # builds on this module

    return PacedGroups(link, limits_rate=limits_rate)


def init(
    meter: Meter,
    *,
    backend: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    store: dist.Store | None = None,
    link: Link | None = None,
    limits_rate: bool = True,
    transport: Name = "auto",
    on_gpu: bool = False,
) -> MeteredProcessGroup:
    """Create a metered process group and make it the default group of this process.

    Args:
        meter: Meter that records bytes and time spans.
        backend: ``"gloo"`` or ``"nccl"``.
        rank: This rank.
        world_size: Number of ranks.
        timeout: Time after which a collective that waits for an unresponsive rank raises an error.
        store: Rendezvous store; None for the store given by the environment variables that `torchrun` sets.
        link: The link to emulate on each rank while its `Pacer` is on; None to run at full speed.
        limits_rate: Whether messages are limited to the link's bandwidth; False if the kernel limits them already.
        transport: Name of the transport; see `transports.open_route`.
        on_gpu: Whether the ranks compute on GPUs.

    Raises:
        LaunchError: The ranks cannot use the transport.
    """
    paced = _paced_groups(link, limits_rate=limits_rate) if link is not None else None
    if store is None:
        store = store_of_this_start(rank, world_size, timeout)

    def create(prefix: dist.Store, rank: int, size: int, timeout: timedelta) -> MeteredProcessGroup:
        route = open_route(
            transport, prefix, rank=rank, world_size=size, backend=backend, timeout=timeout, on_gpu=on_gpu
        )
        if paced is None:
            return MeteredProcessGroup(route, meter, backend)
        return paced.make(route, meter, backend, prefix)

    dist.Backend._plugins.pop(BACKEND.upper(), None)
    if hasattr(dist.Backend, BACKEND.upper()):
        delattr(dist.Backend, BACKEND.upper())
        dist.Backend.backend_list.remove(BACKEND)
    dist.Backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size, timeout=timeout)
    group = dist.group.WORLD
    assert isinstance(group, MeteredProcessGroup)
    return group
