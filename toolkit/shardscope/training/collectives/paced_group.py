"""The metered process group on a paced link: messages one by one, the backend's own collectives as a whole.

The backend's own collectives (such as DistributedDataParallel's all-reduce, FSDP2's stock collectives, broadcasts and
barriers) run as fast as the machine can. Their works then finish only after the time that the algorithm would take on
the link has passed since the last rank started:

    all-reduce                      2(W-1) rounds of a W-th of the tensor each (a ring)
    all-gather, all-to-all          W-1 such rounds
    reduce-scatter                  W-1 such rounds; 2(W-1) on gloo, which runs an all-reduce inside
    broadcast, reduce               ceil(log2 W) rounds of the whole tensor (a tree)
    gather, scatter                 one round in which the root's link carries W-1 parts
    barrier                         ceil(log2 W) rounds of nothing

A round takes the latency plus its bytes over the bandwidth. A collective starts when the one before it is over and the
messages that this rank sent before have left. Messages that are sent during a collective still use the link. Metered
bytes are not affected.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from shardscope.spec import Link
from shardscope.training.collectives.pacing import PacedTransport, Pacer
from shardscope.training.collectives.process_group import MeteredProcessGroup, num_bytes
from shardscope.training.collectives.switch import CollectiveArrivals, Switch
from shardscope.training.meter import Meter, Traffic

_BY_MESSAGE = ("send", "recv")


def seconds_on(link: Link, kind: str, payload: int, world_size: int, backend: str) -> float:
    """Minimum seconds of one of the backend's own collectives, by the rounds and bytes in this module's docstring."""
    others, levels = world_size - 1, (world_size - 1).bit_length()
    if kind == "reduce_scatter":
        kind = "all_reduce" if backend == "gloo" else "all_gather"
    rounds, volume = {
        "all_reduce": (2 * others, 2 * others / world_size),
        "all_gather": (others, others / world_size),
        "all_to_all": (others, others / world_size),
        "broadcast": (levels, levels),
        "reduce": (levels, levels),
        "gather": (min(others, 1), others),
        "scatter": (min(others, 1), others),
        "barrier": (levels, 0),
    }[kind]
    return rounds * link.latency_s + volume * payload / link.bandwidth


_KINDS = (
    "all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "barrier",
)  # fmt: skip


class PacedWork(dist.Work):
    """One of the backend's own collectives, which finishes when it would finish on the link.

    Args:
        inner: The backend's work.
        pacer: This rank's pacer.
        over_at: Returns when it would finish; called after the backend is done.
    """

    def __init__(self, inner: dist.Work, pacer: Pacer, over_at: Callable[[], float]) -> None:
        super().__init__()
        self._inner, self._pacer, self._over_at = inner, pacer, over_at
        self._over = threading.Event()
        self._future: torch.futures.Future[Any] | None = None
        try:
            done = inner.get_future()
        except RuntimeError:  # gloo's reduce_scatter has none: `wait` detects its end instead
            return
        on_gpu = torch.cuda.is_initialized()
        self._future = torch.futures.Future(devices=[torch.cuda.current_device()] if on_gpu else None)
        done.add_done_callback(self._done)

    def _done(self, future: torch.futures.Future[Any]) -> None:
        """Schedule the paced end; called when the backend is done, on any of its threads."""
        assert self._future is not None
        try:
            value = future.value()
        except RuntimeError as error:
            self._over.set()
            self._future.set_exception(error)
            return
        self._pacer.at(self._over_at(), lambda: self._finish(value))

    def _finish(self, value: Any) -> None:
        assert self._future is not None
        if (
            torch.cuda.is_initialized()
        ):  # the future is recorded on this thread's stream, which must wait for the collective
            self._inner.wait()
        self._over.set()
        self._future.set_result(value)

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        if self._future is None and not self._over.is_set():
            self._pacer.at(self._over_at(), self._over.set)
        self._over.wait()
        return done

    def is_completed(self) -> bool:
        return self._over.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            raise RuntimeError("this work has no future; wait for it")
        return self._future


class PacedProcessGroup(MeteredProcessGroup):
    """A metered group where each rank has an emulated link that is slower than the machine.

    Args:
        inner: The group that does the work.
        meter: Records bytes and spans.
        backend: ``"gloo"`` or ``"nccl"``.
        pacer: This rank's pacer; one per process, shared by all its groups.
        arrivals: This group's arrival times.
        has_all: Whether it is the group of all ranks, whose shutdown closes the pacer.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        meter: Meter,
        backend: str,
        *,
        pacer: Pacer,
        arrivals: CollectiveArrivals,
        has_all: bool,
    ) -> None:
        super().__init__(inner, meter, backend)
        self.pacer, self._arrivals, self._has_all = pacer, arrivals, has_all
        self._numbers = itertools.count()

    @cached_property
    def _ranks(self) -> Sequence[int]:
        return range(self.size()) if self._has_all else dist.get_process_group_ranks(self)

    def _rank_of(self, rank: int) -> int:
        return self._ranks[rank]

    def transport(self, device: torch.device) -> Any:
        return PacedTransport(super().transport(device), self.pacer, self._rank_of)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        size = num_bytes(tensors)
        self.meter.count("send", Traffic(size, sent_bytes=size, messages=1, calls=1, sent_to={dst: size}))
        carrier = PacedTransport(self.inner, self.pacer, self._rank_of)
        return self._timed("communication", "send", size, lambda: carrier.send(tensors, dst, tag))

    def _timed(self, lane: str, name: str, payload: int, call: Callable[[], dist.Work]) -> dist.Work:
        if name in _BY_MESSAGE:
            return super()._timed(lane, name, payload, call)
        kind = name if name in _KINDS else "all_reduce"  # `sum_as` uses names of its callers
        return super()._timed(lane, name, payload, lambda: self._paced(kind, payload, call))

    def _paced(self, kind: str, payload: int, call: Callable[[], dist.Work]) -> dist.Work:
        pacer, number = self.pacer, next(self._numbers)
        self._arrivals.note(number, pacer.free_at if pacer.is_on else time.monotonic())
        work = call()
        if not pacer.is_on:
            return work
        seconds = seconds_on(pacer.link, kind, payload, self.size(), self.backend)
        return PacedWork(work, pacer, lambda: pacer.collective(self._arrivals.last(number), seconds))

    def give_up(self) -> None:
        """Stop delaying messages: this rank has closed its connections."""
        self.pacer.hurry()

    def shutdown(self) -> None:
        super().shutdown()
        self._arrivals.close()
        if self._has_all:
            self.pacer.close()


class PacedGroups:
    """Makes this process's groups, which all share one link.

    Args:
        link: The link to emulate on each rank.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._pacer: Pacer | None = None

    def make(
        self, inner: dist.ProcessGroup, meter: Meter, backend: str, store: dist.Store
    ) -> PacedProcessGroup:
        """Make a group; the first one contains all ranks."""
        rank, world_size = inner.rank(), inner.size()
        is_first = self._pacer is None
        if self._pacer is None:
            self._pacer = Pacer(self.link, Switch(store, rank, world_size))
        arrivals = CollectiveArrivals(store, rank, world_size)
        return PacedProcessGroup(
            inner, meter, backend, pacer=self._pacer, arrivals=arrivals, has_all=is_first
        )
