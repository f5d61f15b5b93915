"""Metered process group that emulates a slower link: it delays messages and the backend's collectives.

The backend's collectives (such as the all-reduce of DistributedDataParallel, FSDP2's default collectives,
broadcasts and barriers) run at full speed. Their completion is then delayed: a collective completes when the time that
it takes on the emulated link has passed since the last rank called it. This time depends on W, the number of ranks:

    all-reduce                      2(W-1) rounds with 1/W of the tensor each (a ring)
    all-gather, all-to-all          W-1 rounds with 1/W of the tensor each
    reduce-scatter                  as an all-gather; with gloo as an all-reduce, which is how gloo implements it
    broadcast, reduce               ceil(log2 W) rounds with the whole tensor (a tree)
    gather, scatter                 one round in which the root's link carries W-1 parts
    barrier                         ceil(log2 W) rounds without data

A round takes the latency plus its bytes divided by the bandwidth. A collective starts when the previous one has ended
and all messages that this rank sent earlier have left. Messages sent during a collective are not delayed by it. The
recorded byte counts do not change.
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
from shardscope.training.collectives.plain_tensors import plain
from shardscope.training.collectives.process_group import MeteredProcessGroup, num_bytes
from shardscope.training.collectives.switch import CollectiveArrivals, Switch
from shardscope.training.meter import Meter
from shardscope.training.transports import Route

_BY_MESSAGE = ("send", "recv")


def seconds_on(link: Link, kind: str, payload: int, world_size: int, backend: str) -> float:
    """Return the time that a backend collective takes on a link, in seconds; see the module docstring.

    Args:
        link: The emulated link.
        kind: The collective, such as ``"all_reduce"``.
        payload: Size of the whole tensor, in bytes.
        world_size: Number of ranks in the group.
        backend: ``"gloo"`` or ``"nccl"``.
    """
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
    """Handle of a backend collective that completes when it would complete on the emulated link.

    Args:
        inner: The backend's handle.
        pacer: This rank's pacer.
        over_at: Function that returns the time at which the collective would complete on the link; called when the
            backend has completed it.
    """

    def __init__(self, inner: dist.Work, pacer: Pacer, over_at: Callable[[], float]) -> None:
        super().__init__()
        self._inner, self._pacer, self._over_at = inner, pacer, over_at
        self._over = threading.Event()
        self._future: torch.futures.Future[Any] | None = None
        try:
            done = inner.get_future()
        except RuntimeError:  # gloo's reduce_scatter has no future, so `wait` schedules the completion
            return
        on_gpu = torch.cuda.is_initialized()
        self._future = torch.futures.Future(devices=[torch.cuda.current_device()] if on_gpu else None)
        done.add_done_callback(self._done)

    def _done(self, future: torch.futures.Future[Any]) -> None:
        """Schedule the delayed completion; the backend calls this on one of its threads when it has finished."""
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
            raise RuntimeError("this collective has no future; call its wait() instead")
        return self._future


class PacedProcessGroup(MeteredProcessGroup):
    """Metered process group that emulates a slower link on each rank.

    Args:
        route: The transport, to whose group collectives are forwarded.
        meter: Meter that records bytes and time spans.
        backend: ``"gloo"`` or ``"nccl"``.
        pacer: This rank's pacer; all groups in a process share one.
        arrivals: Stores the times at which ranks arrive at this group's collectives.
        has_all: Whether this group contains all ranks; if so, its shutdown also closes the pacer.
    """

    def __init__(
        self,
        route: Route,
        meter: Meter,
        backend: str,
        *,
        pacer: Pacer,
        arrivals: CollectiveArrivals,
        has_all: bool,
    ) -> None:
        super().__init__(route, meter, backend)
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
        tensors = plain(tensors)
        size = num_bytes(tensors)
        self._count_send(dst, size)
        carrier = PacedTransport(self.inner, self.pacer, self._rank_of)
        return self._timed("communication", "send", size, lambda: carrier.send(tensors, dst, tag))

    def _timed(
        self,
        lane: str,
        name: str,
        payload: int,
        call: Callable[[], dist.Work],
        after: Callable[[], None] = lambda: None,
    ) -> dist.Work:
        if name in _BY_MESSAGE:
            return super()._timed(lane, name, payload, call, after)
        kind = name if name in _KINDS else "all_reduce"  # `sum_as` uses names that its callers choose
        return super()._timed(lane, name, payload, lambda: self._paced(kind, payload, call), after)

    def _paced(self, kind: str, payload: int, call: Callable[[], dist.Work]) -> dist.Work:
        pacer, number = self.pacer, next(self._numbers)
        self._arrivals.note(number, pacer.free_at if pacer.is_on else time.monotonic())
        work = call()
        if not pacer.is_on:
            return work
        seconds = seconds_on(pacer.link, kind, payload, self.size(), self.backend)
        return PacedWork(work, pacer, lambda: pacer.collective(self._arrivals.last(number), seconds))

    def give_up(self) -> None:
        """Stop delaying messages; called when this rank has closed its connections."""
        self.pacer.release_all()

    def shutdown(self) -> None:
        super().shutdown()
        self._arrivals.close()
        if self._has_all:
            self.pacer.close()


class PacedGroups:
    """Creates the process groups of this process, which all share one emulated link.

    Args:
        link: The link to emulate on each rank.
        limits_rate: Whether messages are limited to the link's bandwidth; False if the kernel limits them already.
    """

    def __init__(self, link: Link, *, limits_rate: bool = True) -> None:
        self.link, self.limits_rate = link, limits_rate
        self._pacer: Pacer | None = None

    def make(self, route: Route, meter: Meter, backend: str, store: dist.Store) -> PacedProcessGroup:
        """Create a paced group that forwards to the group of `route`; a process's first group must contain
        all ranks.
        """
        rank, world_size = route.group.rank(), route.group.size()
        is_first = self._pacer is None
        if self._pacer is None:
            self._pacer = Pacer(self.link, Switch(store, rank, world_size), limits_rate=self.limits_rate)
        arrivals = CollectiveArrivals(store, rank, world_size)
        return PacedProcessGroup(
            route, meter, backend, pacer=self._pacer, arrivals=arrivals, has_all=is_first
        )
