"""One observed training loop, from the start of the ``with`` block to its end: hooks, run directory, status."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardscope.errors import LaunchError, ShardscopeError, SpecError, quoted
from shardscope.runlog.tail import Tail, select
from shardscope.runlog.writer import EventWriter
from shardscope.runtime import provenance
from shardscope.runtime.observe._collectives import CollectiveMeter
from shardscope.runtime.observe._describe import Seen
from shardscope.runtime.observe._loop import Loop
from shardscope.runtime.observe._marks import Marks
from shardscope.runtime.observe._place import Place, share
from shardscope.runtime.observe._recorder import StepRecorder, held_by
from shardscope.runtime.processes import process_started
from shardscope.runtime.run import Run
from shardscope.runtime.rundir import RunDir, runs_root
from shardscope.runtime.secondary_failure import is_secondary_failure
from shardscope.runtime.status import Cause
from shardscope.spec import Record
from shardscope.spec.user_code import label_of
from shardscope.training.memory import MemoryWatch, Storages
from shardscope.training.meter import Meter

_OTHERS_S = 10.0
"""Time that rank 0 waits for the last events of other ranks before it writes the summary, in seconds."""
_COURTESY_S = 0.5
"""Time that rank 0 waits for a rank that failed first to write its error, in seconds."""
_POLL_S = 0.02
_active: list[ObserveSession] = []


class ObserveSession(AbstractContextManager[Run]):
    """Observes one training loop. It is the `Listener` of the hooks, and passes their reports to a `StepRecorder`.

    The arguments are those of `shardscope.runtime.observe.observe`. An error in the observer itself ends the recording,
    not the training.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, *, name: str | None, root: str | Path | None,
        record: Record,
    ) -> None:  # fmt: skip
        _check(model, optimizer)
        self._place = Place.now()
        self._seen = Seen(model, _unwrapped(optimizer), name, record, self._place.world_size)
        self._root = runs_root(root)
        self._meter = Meter()
        self._recorder: StepRecorder | None = None
        self._events: EventWriter | None = None
        self._problem: str | None = None
        self._is_announced = False
        self._loop = Loop(model, self, self._safely)
        self._collectives = CollectiveMeter(self._meter, self._collective_begins, self._safely)

    def __enter__(self) -> Run:
        if _active:
            raise SpecError("a training loop is already being observed in this process; end that block first")
        self._dir: RunDir | None = None
        if self._place.is_settled:
            self._begin()
        elif self._place.rank == 0:
            self._dir = self._created()
        self.run = Run(self._dir or RunDir(self._root / "not known before the first step"))
        _active.append(self)
        self._collectives.install()
        self._loop.install()
        return self.run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        _active.remove(self)
        self._loop.remove()
        self._collectives.remove()
        if self._recorder is None and self._place.rank == 0:  # no step was trained
            self._safely(self._begin)
        try:
            self._end(error)
        except Exception as own:  # noqa: BLE001 - the user's own error comes first
            self._give_up(own)

    # What the hooks report.

    def forward_begins(self, inputs: list[Tensor], *, is_whole: bool) -> None:
        if torch.is_grad_enabled():
            if self._recorder is None:
                self._begin()
            if not self._seen.steps:
                self._seen.see_forward()
        if self._recorder is not None:
            self._recorder.forward_begins(inputs, is_whole=is_whole)

    def forward_ends(self) -> None:
        if self._recorder is not None:
            self._recorder.forward_ends()

    def backward_begins(self, roots: Any) -> None:
        if self._recorder is None:
            self._begin()
        if not self._seen.steps:
            self._seen.see_backward()
        assert self._recorder is not None
        self._recorder.backward_begins(roots)

    def backward_ends(self) -> None:
        if self._recorder is not None:
            self._recorder.backward_ends()

    def update_begins(self, optimizer: Optimizer) -> None:
        if self._seen.optimizer is None and _updates(optimizer, self._seen.model):
            self._seen.optimizer = optimizer
            if self._recorder is not None:  # a closure may run the first forward pass inside the update
                self._recorder.optimizer = optimizer
        if self._recorder is not None:
            self._recorder.update_begins(optimizer)

    def update_ends(self, optimizer: Optimizer) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        if optimizer is recorder.optimizer and not self._is_announced:
            self._announce()
        recorder.update_ends(optimizer)
        if recorder.steps > self._seen.steps:
            self._collectives.end_step()
            self._seen.steps = recorder.steps
            if recorder.steps == 1:
                self._seen.samples, self._seen.passes = recorder.last
                self._describe()

    def _collective_begins(self, name: str, payload: int) -> Callable[[], None]:
        if self._recorder is None:
            return lambda: None
        finished: Callable[[], None] = self._recorder.collective_begins(name, payload)
        return finished

    # The run directory.

    def _created(self) -> RunDir:
        directory = RunDir.create(self._seen.job(), self._root)
        directory.write_status("running", pid=os.getpid(), process_started=process_started())
        with suppress(OSError, ShardscopeError):
            provenance.record(directory, command=sys.orig_argv, seed=torch.initial_seed())
        return directory

    def _begin(self) -> None:
        """Start recording, once the rank of this process is known."""
        place = Place.now()
        self._place = place if place.is_joined else Place(0, 1, is_joined=False)
        self._seen.world_size = self._place.world_size
        self._dir = self._settled()
        if hasattr(self, "run"):
            self.run._dir, self.run._tail = self._dir, Tail(self._dir.path)  # noqa: SLF001 - our own run
        rank, model, optimizer = self._place.rank, self._seen.model, self._seen.optimizer
        self._events = EventWriter(self._dir.rank_file(rank), rank)
        self._events.emit("process", pid=os.getpid(), started=process_started())
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        held = Storages()
        held.add_all(held_by(model, optimizer))
        memory = MemoryWatch(device, held_bytes=sum(held.sizes().values()))
        self._recorder = StepRecorder(
            model, self._meter, self._events, Marks(device), memory, record=self._seen.record,
            optimizer=optimizer,
        )  # fmt: skip

    def _settled(self) -> RunDir:
        """Return the run directory, which rank 0 creates."""
        rank, problem = self._place.rank, ""
        if rank == 0 and self._dir is None:
            try:
                self._dir = self._created()
            except LaunchError as error:
                if not self._place.is_joined:
                    raise
                problem = str(error)
        if self._place.is_joined:
            return share(self._dir, rank, problem)
        assert self._dir is not None
        return self._dir

    def _announce(self) -> None:
        """Write the ``start`` event, which states how the ranks share the work."""
        self._is_announced = True
        assert self._events is not None
        job, model = self._seen.job(), self._seen.model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._events.emit(
            "start", world_size=self._place.world_size, device=_device(model), backend=job.backend,
            strategy=job.strategy.label, role=None, model=label_of(job.model), optimizer=job.optimizer.name,
            num_params=sum(parameter.numel() for parameter in model.parameters()),
            gradient_bytes=sum(parameter.nbytes for parameter in trained), compression="none", codecs=None,
            pid=os.getpid(), host=socket.gethostname(),
        )  # fmt: skip

    def _describe(self) -> None:
        """Write all that is known so far to `job.json`."""
        if self._place.rank == 0:
            assert self._dir is not None
            self._dir.write_whole(self._dir.path / "job.json", self._seen.job().to_json().encode())
            self.run._job = None  # noqa: SLF001 - so that it is read again

    # The end.

    def _end(self, error: BaseException | None) -> None:
        if self._recorder is None or self._events is None or self._dir is None:
            return
        if not self._is_announced:
            self._announce()
        traffic = self._recorder.close()
        state = _state(error)
        with self._events:
            if state == "failed":
                assert error is not None
                self._events.emit("error", **self._described(error))
            else:
                self._events.emit("end", state=state, steps=self._recorder.steps, traffic=traffic)
        if self._place.rank == 0:
            self._describe()
            self._conclude(state, error)

    def _conclude(self, state: str, error: BaseException | None) -> None:
        assert self._dir is not None
        fields: dict[str, Any] = {}
        if state == "failed":
            assert error is not None
            fields["error"] = self._first_error(error)
        elif state == "stopped":
            fields = {"reason": "interrupted", "cause": Cause.REQUESTED}
        else:
            self._wait_for_others()
            fields["reason"] = self._problem
        self._dir.write_status(state, pid=os.getpid(), process_started=process_started(), **fields)
        self._dir.write_summary(state)

    def _described(self, error: BaseException) -> dict[str, Any]:
        assert self._recorder is not None
        return {
            "step": self._recorder.steps + 1, "strategy": self._seen.label, "type": type(error).__name__,
            "message": str(error), "traceback": "".join(traceback.format_exception(error)),
        }  # fmt: skip

    def _first_error(self, error: BaseException) -> dict[str, Any]:
        """Return the error that made the run fail: another rank's, if this rank only failed because of that rank."""
        if is_secondary_failure(self._described(error)):
            time.sleep(_COURTESY_S)
        found = self.run._first_error()  # noqa: SLF001 - of our own run
        assert found is not None  # at least this rank's own
        return {"strategy": self._seen.label, **found}

    def _wait_for_others(self) -> None:
        """Wait until the other ranks on this machine have written their last events."""
        assert self._dir is not None
        tail, ended = Tail(self._dir.path), 0
        deadline = time.monotonic() + _OTHERS_S
        while time.monotonic() < deadline:
            events = tail.poll()
            ended += len(select(events, "end", None)) + len(select(events, "error", None))
            if ended >= self._place.num_local:
                return
            time.sleep(_POLL_S)

    # Errors of the observer itself.

    def _safely(self, call: Callable[[], None]) -> None:
        """Run a part of the observer; its first error ends the recording, and the training continues."""
        if self._problem is None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - no error of the observer may end the user's job
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._problem = f"ss.observe stopped recording ({type(error).__name__}: {error})"
        with suppress(Exception):
            logging.getLogger("shardscope").warning(
                "%s; the training continues", self._problem, exc_info=error
            )


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SpecError(f"model={quoted(model)} is not an nn.Module; write ss.observe(model, optimizer)")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise SpecError(
            f"optimizer={quoted(optimizer)} is not a torch.optim.Optimizer; leave it out if a trainer creates its own"
        )


def _unwrapped(optimizer: Optimizer | None) -> Optimizer | None:
    """Return the optimizer inside the wrappers of Accelerate and Lightning."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _updates(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return whether an optimizer updates a parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _device(model: nn.Module) -> str:
    return str(next((parameter.device for parameter in model.parameters()), "cpu"))


def _state(error: BaseException | None) -> str:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "completed"
    return "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
