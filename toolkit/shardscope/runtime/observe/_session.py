"""Observe one training loop from the start to the end of the ``with`` block: hooks, run directory and status."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import threading
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
from shardscope.runlog import clock
from shardscope.runlog.tail import Tail
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.observe._collectives import CollectiveMeter
from shardscope.runtime.observe._describe import Seen, known_parameters
from shardscope.runtime.observe._loop import Loop
from shardscope.runtime.observe._marks import Marks
from shardscope.runtime.observe._optimizers import inside
from shardscope.runtime.observe._place import Place, has_group, share
from shardscope.runtime.observe._recorder import StepRecorder, held_by
from shardscope.runtime.record import provenance
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import RunDir, runs_root
from shardscope.runtime.record.secondary_failure import is_secondary_failure
from shardscope.runtime.record.status import Cause, Status
from shardscope.spec import Record
from shardscope.spec.job_parts import label_of
from shardscope.training.memory import MemoryWatch, Storages
from shardscope.training.meter import Meter, Rows

_OTHERS_S = 10.0
"""Maximum time that rank 0 waits for the last events of other ranks before it writes the summary, in seconds."""
_COURTESY_S = 0.5
"""Time that rank 0 waits, if another rank caused its failure, for that rank to write its error, in seconds."""
_PROVENANCE_S = 2.0
"""Time that the end of the block waits for the provenance, in seconds."""
_POLL_S = 0.02
_active: list[ObserveSession] = []


class ObserveSession(AbstractContextManager[Run]):
    """Observes one training loop: the `Listener` that the hooks call, and that passes their calls to a `StepRecorder`.

    The arguments are the same as for `shardscope.runtime.observe.observe`. An error in the observer itself
    ends the recording, not the training.
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
        self._note: str | None = None
        self._is_announced = self._steps_in_backward = self._is_updating = False
        self._pid = os.getpid()
        self._provenance: threading.Thread | None = None
        self._loop = Loop(model, self, self._safely)
        self._collectives = CollectiveMeter(self._meter, self._collective_begins, self._safely)

    def __enter__(self) -> Run:
        if _active:
            raise SpecError("a training loop is already being observed in this process; end that block first")
        self._dir: RunDir | None = None
        try:
            self._reserve()
        except LaunchError:  # the user's folder
            raise
        except Exception as error:  # noqa: BLE001 - the training can do without being observed
            self._give_up(error)
        self.run = Run(self._dir or RunDir(self._root / "not known before the first step"))
        self._safely(self._install)
        return self.run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._remove()
        if os.getpid() == self._pid:
            self._safely(self._begin_without_step)
            state = _state(error)
            self._safely(self._note_missing_steps)
            self._try(lambda: self._write_end(state, error))
            self._try(lambda: self._conclude(state, error))

    def _reserve(self) -> None:
        """Begin recording if this process has joined a process group; else create the run directory on rank 0."""
        if self._place.is_joined:
            self._begin()
        elif self._place.rank == 0:
            try:
                self._dir = self._created()
            except LaunchError:
                raise
            except Exception:  # noqa: BLE001, S110 - it is raised again once the other ranks can be told
                pass

    def _install(self) -> None:
        _active.append(self)
        try:
            self._collectives.install()
            self._loop.install()
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        if self in _active:
            _active.remove(self)
        self._loop.remove()
        self._collectives.remove()

    # What the hooks report.

    def forward_begins(self, inputs: list[Tensor], *, is_whole: bool) -> None:
        if torch.is_grad_enabled():
            self._begin_if_due()
            if not self._seen.steps:
                self._seen.see_forward()
        if self._recorder is not None:
            self._recorder.forward_begins(inputs, is_whole=is_whole)

    def forward_ends(self, output: Any) -> None:
        if self._recorder is not None:
            self._recorder.forward_ends(output)

    def backward_begins(self, roots: Any) -> None:
        self._begin_if_due()
        if not self._seen.steps:
            self._seen.see_backward()
        assert self._recorder is not None
        self._recorder.backward_begins(roots)

    def backward_ends(self) -> None:
        if self._recorder is not None:
            self._recorder.backward_ends()

    def update_begins(self, optimizer: Optimizer) -> None:
        updates = self._seen.optimizers.take(optimizer)
        if self._seen.optimizer is None and updates:
            self._seen.optimizer = optimizer
            if self._recorder is not None:  # a closure may run the first forward pass inside the update
                self._recorder.optimizer = optimizer
        self._is_updating |= optimizer is self._seen.optimizer
        if self._recorder is not None:
            self._recorder.update_begins(self._standing_for(optimizer))

    def _standing_for(self, optimizer: Optimizer) -> Optimizer:
        """Return the observed optimizer if it wraps `optimizer` and steps through it, like SAM; else `optimizer`."""
        observed = self._seen.optimizer
        if observed is None or optimizer is observed or self._is_updating:
            return optimizer
        return observed if optimizer in inside(observed)[-1:] else optimizer

    def update_ends(self, optimizer: Optimizer, *, skipped: bool) -> None:
        optimizer = self._standing_for(optimizer)
        self._is_updating &= optimizer is not self._seen.optimizer
        recorder = self._recorder
        if recorder is None:
            return
        if optimizer is recorder.optimizer and not self._is_announced:
            self._announce()
        recorder.update_ends(optimizer, skipped=skipped)
        if recorder.steps > self._seen.steps:
            self._collectives.end_step()
            self._seen.steps = recorder.steps
            if recorder.steps == 1:
                self._seen.samples, self._seen.passes = recorder.last
                self._describe()

    def updated_in_backward(self, optimizers: list[Optimizer]) -> None:
        """End the step of optimizers that step in hooks on their parameters, often one optimizer per parameter."""
        own = [each for each in optimizers if self._seen.optimizers.take(each)]
        observed = self._seen.optimizer
        if observed is None or any(each is observed for each in own):
            self._steps_in_backward = bool(own)
        if own and self._steps_in_backward:
            self.update_begins(observed or own[0])
            self.update_ends(observed or own[0], skipped=False)

    def _collective_begins(self, name: str, payload: int) -> Callable[[], None]:
        if self._recorder is None:
            return lambda: None
        finished: Callable[[], None] = self._recorder.collective_begins(name, payload)
        return finished

    # The run directory.

    def _created(self) -> RunDir:
        directory = RunDir.create(self._seen.job(), self._root)
        directory.write_status("running", pid=os.getpid(), process_started=process_started())
        return directory

    def _begin_if_due(self) -> None:
        """Begin recording at the first pass; restart it if the process joins a group before its first step ends."""
        if self._recorder is None or not (self._place.is_joined or self._seen.steps or not has_group()):
            self._begin()

    def _begin_without_step(self) -> None:
        """Begin recording at the end of the block if no step was trained; only rank 0 then has anything to record."""
        if self._recorder is None and Place.now().rank == 0:
            self._begin(shares=False)
        elif self._recorder is None:
            self._drop_reserved()

    def _begin(self, *, shares: bool = True) -> None:
        """Start recording, once the rank of this process is known."""
        self._stop_solo_recording()
        clock.start({})  # the process may be days older, and the wall clock may have been set since
        place = Place.now()
        self._place = place if place.is_joined else Place(0, 1, is_joined=False)
        self._seen.world_size = self._place.world_size
        self._dir = self._settled(shares=shares)
        if self._place.rank == 0:
            self._describe()  # the number of ranks may not have been known before
            self._record_provenance()
        if hasattr(self, "run"):
            self.run._move_to(self._dir)  # noqa: SLF001 - our own run
        rank, model, optimizer = self._place.rank, self._seen.model, self._seen.optimizer
        self._events = EventWriter(self._dir.rank_file(rank), rank)
        self._events.emit("process", pid=os.getpid(), started=process_started())
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        held = Storages()
        held.add_all(held_by(model, self._seen.optimizers))
        memory = MemoryWatch(device, held_bytes=sum(held.sizes().values()))
        self._recorder = StepRecorder(
            model, self._meter, self._events, Marks(device), memory, record=self._seen.record,
            optimizer=optimizer, optimizers=self._seen.optimizers,
        )  # fmt: skip

    def _stop_solo_recording(self) -> None:
        """Stop the recording, if any, that began before this process joined a process group."""
        if self._recorder is not None and self._events is not None:
            self._recorder.close()
            self._events.close()
        self._recorder, self._seen.exchanges = None, 0

    def _settled(self, *, shares: bool) -> RunDir:
        """Return the run directory, created by rank 0."""
        rank, problem = self._place.rank, None
        if rank:
            self._drop_reserved()
        elif self._dir is None:
            try:
                self._dir = self._created()
            except Exception as error:  # noqa: BLE001 - other ranks wait for the directory, or for this
                problem = error
        if self._place.is_joined and shares:
            return share(self._dir, rank, problem)
        if problem is not None:
            raise problem
        assert self._dir is not None
        return self._dir

    def _drop_reserved(self) -> None:
        """Delete the directory that this process created before it knew that its rank is not 0."""
        self._await_provenance()  # written into the same directory
        if self._dir is not None:
            shutil.rmtree(self._dir.path, ignore_errors=True)
            self._dir = None

    def _record_provenance(self) -> None:
        """Record versions, machine and git state in a thread, as git may take seconds."""

        def record(directory: RunDir, seed: int) -> None:
            with suppress(OSError, ShardscopeError):  # a full disk must not end the run
                provenance.record(directory, command=sys.orig_argv, seed=seed)

        if self._provenance is None:
            arguments = self._dir, torch.initial_seed()
            self._provenance = threading.Thread(target=record, args=arguments, name="provenance", daemon=True)
            self._provenance.start()

    def _await_provenance(self) -> None:
        if self._provenance is not None:
            self._provenance.join(_PROVENANCE_S)

    def _announce(self) -> None:
        """Write the ``start`` event, which describes the strategy, the model and the device of this rank."""
        self._is_announced = True
        assert self._events is not None
        job, model = self._seen.job(), self._seen.model
        parameters = known_parameters(model)
        gradient_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        self._events.emit(
            "start", world_size=self._place.world_size, device=_device(model), backend=job.backend,
            strategy=job.strategy.label, role=None, model=label_of(job.model), optimizer=job.optimizer.name,
            num_params=sum(parameter.numel() for parameter in parameters),
            gradient_bytes=gradient_bytes, compression="none", codecs=None, pid=os.getpid(), host=socket.gethostname(),
        )  # fmt: skip

    def _describe(self) -> None:
        """Replace `job.json` by a description of all that has been observed so far."""
        if self._place.rank == 0:
            assert self._dir is not None
            self._dir.write_whole(self._dir.path / "job.json", self._seen.job().to_json().encode())
            if hasattr(self, "run"):
                self.run._job = None  # noqa: SLF001 - so that it is read again

    # The end.

    def _note_missing_steps(self) -> None:
        """Report if backward passes ran, but no step of the observed optimizer was seen.

        The recording has failed only if an optimizer is known and something else has changed the weights. Scripts may
        update weights by hand, or compute gradients only.
        """
        recorder = self._recorder
        if recorder is not None and recorder.is_replaced:
            self._problem = (
                f"ss.observe recorded nothing after step {recorder.steps}, because the observed optimizer no longer "
                "stepped, but another one updated the model; use one ss.observe block for each optimizer"
            )
            logging.getLogger("shardscope").warning("%s", self._problem)
        if recorder is None or not recorder.is_trained_without_step:
            return
        observed = self._seen.optimizer
        what = (
            "an optimizer of torch"
            if observed is None
            else f"{type(observed).__name__}, the observed optimizer,"
        )
        sentence = (
            f"ss.observe recorded no step, because {what} never stepped after a backward pass of the model; pass the "
            "optimizer whose step() is called"
        )
        if observed is not None and recorder.has_changed_weights:
            self._problem = sentence
        else:
            self._note = sentence
        logging.getLogger("shardscope").warning("%s", sentence)

    def _write_end(self, state: str, error: BaseException | None) -> None:
        """Write the last events of this rank: those the recorder has not written yet, and how the block ended."""
        recorder, events = self._recorder, self._events
        if recorder is None or events is None:
            return
        traffic: Rows = {}
        with events:
            if not self._is_announced:
                self._try(self._announce)
            self._try(lambda: traffic.update(recorder.close()))
            if error is not None and state == "failed":
                events.emit("error", **self._described(error))
            elif self._problem is not None and state == "completed":
                events.emit(
                    "end", state="stopped", steps=recorder.steps, traffic=traffic, reason=self._problem
                )
            else:
                events.emit("end", state=state, steps=recorder.steps, traffic=traffic)

    def _conclude(self, state: str, error: BaseException | None) -> None:
        """Write the final status and the summary, each even if another file cannot be written."""
        directory = self._dir
        if self._place.rank:
            return
        if directory is None:
            self._conclude_without_directory()
            return
        outcome: dict[str, Any] = {}
        self._try(lambda: outcome.update(self._outcome(state, error)))
        self._try(self._describe)
        ended = "stopped" if state == "completed" and (self._problem or outcome.get("cause")) else state
        self._try(
            lambda: directory.write_status(
                ended, pid=os.getpid(), process_started=process_started(), **outcome
            )
        )
        self._try(lambda: directory.write_summary(ended))
        self._await_provenance()

    def _conclude_without_directory(self) -> None:
        """Store in the run why nothing was recorded."""
        self.run._last_status = Status(  # noqa: SLF001 - our own run
            "stopped", os.getpid(), process_started(), t=time.time(), reason=self._problem,
            cause=Cause.RECORDING_STOPPED,
        )  # fmt: skip

    def _outcome(self, state: str, error: BaseException | None) -> dict[str, Any]:
        """Return the fields of the final status that describe how the block ended."""
        if error is not None and state == "failed":
            return {"error": self._first_error(error)}
        if state == "stopped":
            return {"reason": "interrupted", "cause": Cause.REQUESTED}
        reason = self._problem or self._missing_ranks()
        if reason is not None:
            return {"reason": reason, "cause": Cause.RECORDING_STOPPED}
        return {} if self._note is None else {"reason": self._note}

    def _described(self, error: BaseException) -> dict[str, Any]:
        return {
            "step": self._seen.steps + 1, "strategy": self._seen.label, "type": type(error).__name__,
            "message": str(error), "traceback": "".join(traceback.format_exception(error)),
        }  # fmt: skip

    def _first_error(self, error: BaseException) -> dict[str, Any]:
        """Return the error that made the run fail: another rank's error, if this rank failed only because of it."""
        own = self._described(error)
        if is_secondary_failure(own):
            time.sleep(_COURTESY_S)
        found = self.run._first_error()  # noqa: SLF001 - of our own run
        if found is None:  # not even this rank's own could be written
            found = {**own, "rank": 0, "message": f"rank 0 failed: {own['type']}: {own['message']}"}
        return {"strategy": self._seen.label, **found}

    def _missing_ranks(self) -> str | None:
        """Wait for the last events of the ranks on this machine; return why a recording is incomplete, or None."""
        assert self._dir is not None
        tail, ended = Tail(self._dir.path), 0
        deadline = time.monotonic() + _OTHERS_S
        while time.monotonic() < deadline:
            for event in (event for batch in tail.batches() for event in batch):
                ended += event["event"] in ("end", "error")
                if event["event"] == "end":  # with `Join`, a rank may train more steps than others
                    self._seen.steps = max(self._seen.steps, event.get("steps", 0))
                if event.get("reason") and event["event"] == "end":
                    return f"on rank {event['rank']}, {event['reason']}"
            if ended >= self._place.num_local:
                return None
            time.sleep(_POLL_S)
        return f"only {ended} of {self._place.num_local} ranks recorded this loop to its end"

    # Errors of the observer itself.

    def _safely(self, call: Callable[[], None]) -> None:
        """Run a part of the observer; its first error ends the recording, and the training continues."""
        if self._problem is None and os.getpid() == self._pid:  # a forked process is not the observed one
            self._try(call)

    def _try(self, call: Callable[[], None]) -> None:
        """Run a part of the observer, even after an error."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - no error of the observer may end the user's job
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End the recording with one warning, and make room for the final status if the disk is full."""
        if self._problem is not None:
            return
        self._problem = f"ss.observe stopped recording ({type(error).__name__}: {error})"
        with suppress(Exception):
            logging.getLogger("shardscope").warning(
                "%s; the training continues", self._problem, exc_info=error
            )
        if self._dir is not None and self._place.rank == 0:
            with suppress(OSError):
                self._dir.release_reserve()


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SpecError(f"model={quoted(model)} is not an nn.Module; write ss.observe(model, optimizer)")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise SpecError(
            f"optimizer={quoted(optimizer)} is not a torch.optim.Optimizer; omit it if a trainer creates its own"
        )


def _unwrapped(optimizer: Optimizer | None) -> Optimizer | None:
    """Return the optimizer inside the wrappers of Accelerate and Lightning."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _device(model: nn.Module) -> str:
    return str(next((parameter.device for parameter in model.parameters()), "cpu"))


def _state(error: BaseException | None) -> str:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "completed"
    return "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
