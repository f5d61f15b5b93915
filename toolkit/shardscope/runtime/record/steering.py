"""Waiting for a run, stopping it and answering it, from any process: requests are files in the run directory."""

from __future__ import annotations

import contextlib
import time
from operator import index
from typing import TYPE_CHECKING, Self

from shardscope.errors import ShardscopeError, SpecError
from shardscope.runlog.tail import first_events, read_events
from shardscope.runtime.record.inject import inject
from shardscope.runtime.record.processes import end_run
from shardscope.runtime.record.run_part import RunPart
from shardscope.runtime.record.rundir import this_host
from shardscope.runtime.record.status import Cause, Status
from shardscope.spec.observed import ObservedJob

if TYPE_CHECKING:
    from shardscope.spec.faults import Faults

_POLL_S = 0.02
_START_S = 120.0  # time that `stop` waits for a run that is still starting, in seconds
_KILL_AFTER_S = 10.0
"""Seconds that an agent may take to write the final status after the grace period, or after writing a checkpoint."""


class Steered(RunPart):
    """The part of a `Run` that waits for the run, stops it, and breaks it."""

    _last_status: Status | None

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the run has ended.

        Args:
            timeout: Seconds to wait; None waits indefinitely.

        Raises:
            RunFailed: A rank failed; the message names rank, step and strategy and includes the rank's traceback.
            TimeoutError: The run has not ended in time; it keeps running.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"run {self.id} has not ended within {timeout:g} s; it keeps running, and run.stop() ends it"
                )
            time.sleep(_POLL_S)
        error = self.error
        if error is not None:
            raise error
        return self

    def stop(self, grace_s: float = 5.0) -> Self:
        """Stop the run at the end of the current step, or kill it after `grace_s` seconds.

        Returns when the run has ended and neither its agent nor its ranks are running on this machine. If it had
        already ended, only ranks that outlived it are killed. An elastic run whose newest state is in memory writes it
        to the disk first, which takes longer if it is large. Two kinds of run may still be running when this returns,
        and stop as soon as they see the request: a run on another machine that has not stopped within ten seconds after
        `grace_s`, and a run whose agent has not started within two minutes.

        Raises:
            SpecError: The run is an observed training loop, which only its own script can end.
        """
        if self.is_alive and isinstance(self.job, ObservedJob):
            raise SpecError(
                f"run {self.id} records a training script (ss.observe), so it cannot be stopped from here; end the "
                "script"
            )
        if self.is_alive:
            self._ask_to_stop(grace_s)
        self._see_out(0.0 if self.is_alive else _KILL_AFTER_S)
        return self

    def _ask_to_stop(self, grace_s: float) -> None:
        """Write the stop request, and wait until the run has ended or its agent has exceeded its time limit."""
        with contextlib.suppress(
            OSError
        ):  # without a request, the run is killed below; if the directory is missing, the agent ends the run
            self._dir.request_stop(grace_s)
        deadline, written = time.monotonic() + grace_s + _KILL_AFTER_S, 0
        while self.is_alive and (time.monotonic() < deadline + _START_S * (self.state == "starting")):
            time.sleep(
                _POLL_S
            )  # while the run is starting there is no agent yet; the agent finds the request once it has started
            before, written = written, self._dir.unfinished_bytes()
            if written > before:  # the agent of an elastic run copies the state from memory to the disk
                deadline = max(deadline, time.monotonic() + _KILL_AFTER_S)

    def inject(self, faults: Faults | str) -> Self:
        """Carry out more faults in this run, which must be running; `launch` takes those that are known beforehand.

        A fault whose step has passed is carried out before the next step. The ranks notice it within a tenth of a
        second.

        Args:
            faults: The faults, such as ``ss.Faults().kill(rank=1, step=40)``, or their text.

        Raises:
            SpecError: The run has ended, or is an observed training loop. Or a fault cannot occur in it on its current
                number of ranks, or is at a time instead of a step.

        Example:
            >>> run.inject("kill rank=1 step=40")  # doctest: +SKIP
        """
        if isinstance(self.job, ObservedJob):
            raise SpecError(
                f"run {self.id} records a training script (ss.observe), which carries out no faults; launch a job"
            )
        if not self.is_alive:
            raise SpecError(f"run {self.id} has ended ({self.state}); inject faults while it is running")
        inject(self._dir, self.resized_job, self._dir.read_cluster(), faults)
        return self

    @property
    def newest_checkpoint(self) -> int | None:
        """Step of the newest complete checkpoint of this run; None if it has none."""
        return max(self._dir.saved_steps(), default=None)

    def approve(self, step: int) -> None:
        """Let a run launched with ``gated=True`` continue past its evaluation at `step`.

        Raises:
            SpecError: The run was launched without ``gated=True``.
        """
        if not self._dir.approval.exists():
            raise SpecError(f"run {self.id} does not wait for approval; launch it with gated=True")
        self._dir.approve(index(step))

    def _see_out(self, patience_s: float) -> None:
        """Wait until the run's processes have ended; after `patience_s` seconds, kill the agent and its ranks."""
        status = self._last_status
        if status is None or status.host != this_host():
            return  # the run's processes are on another machine
        if status.state == "starting" or status.cause is Cause.NOT_STARTED:
            return  # the recorded process is the launch server
        is_first = (
            not status.restarts and not self._is_elastic()
        )  # else each rank may have had other processes
        started = first_events(self.path) if is_first else read_events(self.path, kind="process")
        ranks = [(event["pid"], event["started"]) for event in started if "started" in event]
        end_run((status.pid, status.process_started), ranks, patience_s)

    def _is_elastic(self) -> bool:
        try:
            return getattr(self.job, "elastic", None) is not None
        except ShardscopeError:  # the run directory is gone
            return False
