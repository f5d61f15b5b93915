"""Emulated computation: a rank really computes, and then sleeps until an emulated processor would have finished.

The time of a pass on that processor is determined in one of two ways. If the node's FLOP/s are given, it is the FLOPs
of the pass divided by the FLOP/s, regardless of the load on this machine's cores; the FLOPs are counted in the first
forward pass. Otherwise, it is the CPU time of the pass, multiplied by the node's slowdown.

A pass sleeps at its end. With given FLOP/s, it also sleeps within layers, after each part that has other FLOPs on other
ranks and in other passes, such as a rank's own experts, before other ranks get the results of this part.

The passes of a pipeline's stages queue up on the emulated processor, as on a GPU: a pass starts when the previous pass
has ended and its own input has arrived, even if this process is still busy between the passes. It takes longer by the
time for which it waits for other ranks, as for those that hold the other parts of its layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from shardscope.spec import Job
from shardscope.spec.cluster.emulated import EmulatedNode
from shardscope.training import clock

_GRADIENTS = 2.0
"""FLOPs of a backward pass relative to the forward pass, without recomputation."""


class _Spent(NamedTuple):
    """Elapsed time without waits for other ranks, and compute time of this thread (CPU or GPU), in seconds."""

    elapsed: float
    computing: float


@dataclass
class _Due:
    """Time at which a backward pass ends on the emulated processor, in Unix seconds."""

    at: float


@dataclass
class PassSpan:
    """Start and end of a pass, in Unix seconds; filled in when the pass has ended.

    Attributes:
        start: Start of the pass, on the emulated processor if there is one.
        end: End of the pass; 0 until then.
    """

    start: float
    end: float = 0.0


class ComputePace:
    """Makes the computation of this thread take as long as on the emulated processor of its node, by sleeping.

    Time in which other ranks occupy the cores counts as part of the sleep; time spent waiting for other ranks' messages
    does not.

    Args:
        job: The job.
        node: The node.
        is_on_gpu: Whether the rank computes on a GPU, whose elapsed time then counts instead of CPU time.
    """

    def __init__(self, job: Job, node: EmulatedNode, *, is_on_gpu: bool = False) -> None:
        self._node = node
        self._is_on_gpu = is_on_gpu
        self.factor = 1.0
        """Factor by which this rank is slowed down in addition to the node's slowdown, such as by an injected fault."""
        self._update_bytes = job.optimizer.states.moved_bytes_per_param(job.element_bytes)
        self._backward_passes = job.backward_passes
        self._flops: dict[int, float] = {}
        self._usual_flops: dict[int, float] = {}  # without those of parts that differ from pass to pass
        self._part_flops: float | None = None  # of such parts in this pass, if it has any
        self._part_at = 0.0
        self._gradients: float | None = None  # None outside passes
        self._waited_s = self._late_s = self._last_computing = 0.0
        self._due: _Due | None = None
        self._has_held = False
        self._free_at = math.inf
        self.arrived_at = 0.0
        """Time at which the newest message of another rank arrived, in Unix seconds."""
        self.backward_end: float | None = None
        """Time at which the last pass of `exchanging_backward` ended on the emulated processor, in Unix seconds; None
        if the node's FLOP/s are not given."""

    @property
    def _slowdown(self) -> float:
        return self._node.slowdown * self.factor

    def take_late(self) -> float:
        """Return and reset the seconds by which computation took longer than on the emulated processor."""
        late, self._late_s = self._late_s, 0.0
        return late

    @contextmanager
    def waiting(self, *, is_within_layer: bool = False) -> Iterator[None]:
        """Return a context manager around a wait for other ranks within a pass.

        Args:
            is_within_layer: Whether the pass needs the result to go on, so that its gradients are ready later.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            waited = time.perf_counter() - start
            self._waited_s += waited
            if is_within_layer and self._due is not None:
                self._due.at += waited

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Return a context manager around a forward pass of a stage; at its end, it sleeps for the remaining time."""
        if self._node.flops is None:
            with self._lasting(None):
                yield
            return
        if stage in self._flops:
            spent = self._watch()
            with self._in_parts(stage, 1):
                yield
            self._sleep((self._pass_s(stage) or 0.0) - spent().elapsed, can_be_late=True)
            return
        from shardscope.training.flops import flop_counter  # a slow import, needed only here

        self._part_flops = None
        with flop_counter() as counter:
            yield
        self._flops[stage] = float(counter.get_total_flops())
        self._usual_flops[stage] = self._flops[stage] - (self._part_flops or 0.0)
        time.sleep(self._pass_s(stage) or 0.0)  # in full: counting takes longer than computing

    def begin_part(self) -> None:
        """Mark the start of a part of a layer whose FLOPs differ between ranks and passes."""
        self._part_at = clock.now()

    def end_part(self, flops: float, *, is_forward: bool) -> None:
        """Sleep until the part since `begin_part` has ended on the emulated processor; the pass sleeps less at its end.

        Args:
            flops: FLOPs of the part in a forward pass.
            is_forward: Whether it was computed forward, possibly again in a backward pass.
        """
        if is_forward:
            self._part_flops = (self._part_flops or 0.0) + flops
        if self._gradients is not None and self._node.flops is not None:
            times = self._slowdown * (1.0 if is_forward else self._gradients)
            self._sleep(self._part_at + times * flops / self._node.flops - clock.now(), can_be_late=False)

    @contextmanager
    def _in_parts(self, stage: int, passes: float) -> Iterator[None]:
        """Return a context manager around a pass of a stage, in which `end_part` sleeps; arguments as of `queued`.

        After a forward pass, the FLOPs of the stage are those of this pass, also for backward passes.
        """
        recomputed = self._backward_passes - _GRADIENTS
        self._part_flops, self._gradients = None, max(0.0, passes - recomputed)
        try:
            yield
        finally:
            self._gradients = None
        if passes == 1 and self._part_flops is not None:
            self._flops[stage] = self._usual_flops[stage] + self._part_flops

    def recount(self) -> None:
        """Discard the FLOP counts of all passes, because the micro-batch size changes; the next passes are counted."""
        self._flops.clear()

    def begin_queue(self) -> None:
        """Mark the emulated processor as free from now on; the passes of `queued` then run on it one after another."""
        self._free_at = clock.now()

    @contextmanager
    def queued(self, stage: int, passes: float, times: PassSpan) -> Iterator[None]:
        """Return a context manager around a pass of a pipeline's stage; it sleeps at the end.

        Args:
            stage: The stage.
            passes: FLOPs of the pass relative to the stage's forward pass.
            times: Result: the start and the end of the pass on the emulated processor.
        """
        wanted = self._pass_s(stage, passes)
        if not wanted:
            with self.forward(stage) if passes == 1 else self._lasting(wanted):
                yield
            self._free_at = clock.now()
            return
        times.start, waited = max(self._free_at, self.arrived_at), self._waited_s
        with self._in_parts(stage, passes):
            yield
        wanted = self._pass_s(stage, passes) or 0.0  # with the parts of this pass
        self._free_at = times.start + wanted + self._waited_s - waited
        late = clock.now() - self._free_at
        self._sleep(-late, can_be_late=True)
        self._free_at += max(0.0, late)
        times.end = self._free_at

    @contextmanager
    def exchanging_backward(self, handed_over: Callable[[], float]) -> Iterator[None]:
        """Return a context manager around a backward pass that may exchange gradients, which other ranks wait for.

        If the time of the pass is known from FLOP/s, gradients wait in `hold_gradients` until that time has passed; a
        pass whose gradients do not wait there sleeps at the end. Otherwise, the pass sleeps at the start, for as long
        as the previous pass was too fast.

        Args:
            handed_over: Function that returns the time at which the last gradients were passed to their collective, in
                Unix seconds; infinity if there were none.
        """
        wanted = self._pass_s(0, self._backward_passes)
        if wanted is None:
            time.sleep((self._slowdown - 1) * self._last_computing)
        spent, start = self._watch(), clock.now()
        due = None if wanted is None else _Due(start + wanted)
        self._due, self._has_held, self.backward_end = due, False, None
        try:
            with self._in_parts(0, self._backward_passes):
                yield
        finally:
            self._due = None
        elapsed, self._last_computing = spent()
        if wanted is None or due is None:
            return
        start += due.at - (start + wanted)  # by the waits within layers
        taken = min(elapsed, handed_over() - start)
        if self._has_held:
            self._late_s += max(0.0, taken - wanted)
            self.backward_end = start + max(taken, wanted)
        else:
            self._sleep(wanted - elapsed, can_be_late=True)
            self.backward_end = clock.now()

    def hold_gradients(self) -> None:
        """Wait until the backward pass is over on the emulated processor; called on any thread before an exchange."""
        due = self._due
        if due is not None:
            self._has_held, at = True, -math.inf
            while at < due.at:  # waits within layers may move it
                at = due.at
                time.sleep(max(0.0, at - clock.now()))

    @contextmanager
    def update(self, elements: int) -> Iterator[None]:
        """Return a context manager around the update of a number of parameters; it sleeps at the end."""
        rate = self._node.memory_bandwidth
        if rate is None and self._node.flops is not None:
            yield
            return
        with self._lasting(None if rate is None else elements * self._update_bytes / rate * self._slowdown):
            yield

    def _pass_s(self, stage: int, passes: float = 1.0) -> float | None:
        """Return the time of a pass from its FLOPs, in seconds; None if the node has a slowdown but no FLOP/s."""
        node = self._node
        return (
            None if node.flops is None else passes * self._flops.get(stage, 0.0) / node.flops * self._slowdown
        )

    @contextmanager
    def _lasting(self, wanted: float | None) -> Iterator[None]:
        """Return a context manager that lasts `wanted` seconds; if None, its compute time times the slowdown."""
        spent = self._watch()
        yield
        elapsed, computing = spent()
        self._sleep(
            (self._slowdown * computing if wanted is None else wanted) - elapsed,
            can_be_late=bool(wanted),
        )

    def _sleep(self, seconds: float, *, can_be_late: bool) -> None:
        time.sleep(max(0.0, seconds))
        if can_be_late:
            self._late_s += max(0.0, -seconds)

    def _watch(self) -> Callable[[], _Spent]:
        start, processor, waited = time.perf_counter(), time.thread_time(), self._waited_s

        def spent() -> _Spent:
            if self._is_on_gpu:
                import torch  # readers of recorded spans use this module without it

                torch.cuda.synchronize()
            elapsed = time.perf_counter() - start - (self._waited_s - waited)
            return _Spent(elapsed, elapsed if self._is_on_gpu else time.thread_time() - processor)

        return spent
