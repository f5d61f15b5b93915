"""The driver's view of a run, whose data are all read from the run directory.

A `Run` does not depend on the process that launched it. After a page reload, in another kernel, or years later,
`Run.attach` returns an equivalent object with the whole history, and `stop` works from any process.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shardscope.errors import RunFailed, RunUnreadable, ShardscopeError, SpecError, quoted
from shardscope.methods.strategies.pipeline import Pipeline
from shardscope.runlog.files import read_tail
from shardscope.runlog.layers import Layers, layers_of, reports_layers
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.summary import Summary, summarise
from shardscope.runlog.tail import Event, Tail, first_events, of_last_attempt, read_events, select
from shardscope.runtime.launcher.driver_server import driver
from shardscope.runtime.record.about import read_about, write_about
from shardscope.runtime.record.inject import inject
from shardscope.runtime.record.launch_prediction import LaunchPrediction
from shardscope.runtime.record.processes import end_run, is_alive
from shardscope.runtime.record.rundir import ROOT_VARIABLE, RunDir, find, holds_run, this_host
from shardscope.runtime.record.secondary_failure import is_secondary_failure
from shardscope.runtime.record.status import FINAL_STATES, Cause, Status, printable
from shardscope.spec import Job
from shardscope.spec.job_parts import label_of
from shardscope.spec.observed import ObservedJob
from shardscope.spec.units import plural
from shardscope.storage.rows import require_batch

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.analytic.large_batch.noise_scale import NoiseScale
    from shardscope.runlog.step_events import StepEvents
    from shardscope.runtime.record.provenance import Provenance
    from shardscope.spec.cluster import EmulatedCluster
    from shardscope.spec.faults import Faults

_POLL_S = 0.02
_START_S = 120.0
"""Time that `stop` waits for a run that is still starting, in seconds."""
_KILL_AFTER_S = 10.0
"""Time in seconds within which an agent must write the final status after the grace period, or after a checkpoint."""


# Long because it is one class, with all that users can do with a run.
class Run:
    """One run of a job. Returned by `launch`, `runs` and `Run.attach`."""

    def __init__(self, directory: RunDir, job: Job | None = None) -> None:
        self._last_status: Status | None = None
        self._reading = threading.RLock()  # widgets read the same run from several threads
        self._move_to(directory, job)

    def _move_to(self, directory: RunDir, job: Job | None = None) -> None:
        """Switch to another run directory and discard everything read so far."""
        with self._reading:
            self._dir, self._job = directory, job
            self._read_again()

    def _read_again(self) -> None:
        self._tail = Tail(self.path)
        self._events: list[Event] = []
        # a separate tail, so that a run whose events nobody asks for keeps none of them in memory
        self._log_tail = Tail(self.path)
        self._log: RunLog | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._dir, self._job)

    @classmethod
    def attach(cls, id_or_path: Self | str | Path, root: str | Path | None = None) -> Self:
        """Return the run in this directory, or with this name in the folder of runs, whether it has ended or not.

        Args:
            id_or_path: Path of the run directory, or name of the run; a run is returned as it is.
            root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.

        Raises:
            RunNotFound: No such run exists.
            RunUnreadable: The run exists but is corrupt, or private to another user.
            SpecError: The argument is not a run, a path or a name.
        """
        if isinstance(id_or_path, cls):
            return id_or_path
        if not isinstance(id_or_path, str | Path):
            raise SpecError(f"{quoted(id_or_path)} is not a run; give a Run, its name or its directory")
        directory = find(id_or_path, root)
        return cls(directory, directory.read_job())

    # Identity and state.

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._dir.path

    @property
    def id(self) -> str:
        """Name of the run directory: a timestamp and the run's name. Unprintable characters are escaped."""
        return printable(self.path.name)

    @property
    def name(self) -> str:
        """Name of the job, or its strategy and model if it has no name."""
        return self.job.label

    @property
    def job(self) -> Job:
        """The job that was launched. User functions appear by name only; they are not loaded."""
        if self._job is None:
            try:
                self._job = self._dir.read_job()
            except RunUnreadable:
                last = self._last_status
                if last is None or last.cause is not Cause.RECORDING_STOPPED:
                    raise
                raise RunUnreadable(f"nothing of this run was recorded: {last.reason}") from None
        return self._job

    @property
    def cluster(self) -> EmulatedCluster | None:
        """The emulated cluster that the run was launched on; None if it ran on this machine itself."""
        return self._dir.read_cluster()

    @property
    def provenance(self) -> Provenance | None:
        """Versions, machine, git state and command line at the launch of the run; None if they were not recorded.

        They are recorded within a fraction of a second after the launch, except in runs from earlier versions.
        """
        from shardscope.runtime.record.provenance import read

        return read(self._dir)

    @property
    def state(self) -> str:
        """State of the run: ``starting``, ``running``, ``completed``, ``stopped`` or ``failed``."""
        return self._status().state

    @property
    def state_text(self) -> str:
        """State of the run, with the number of restarts if there were any: ``completed after 2 restarts``."""
        return self._status().text

    @property
    def restarts(self) -> int:
        """Number of times the ranks have been restarted after a failure (see `Job.recovery`)."""
        return self._status().restarts

    @property
    def is_alive(self) -> bool:
        """Whether the run has not ended yet."""
        return self.state not in FINAL_STATES

    @property
    def error(self) -> RunFailed | None:
        """The error with which the run failed; None if it did not fail."""
        details = self._status().error
        if details is None:
            return None
        return RunFailed(
            details["message"], rank=details.get("rank"), step=details.get("step"),
            strategy=details.get("strategy"), traceback=details.get("traceback", ""),
        )  # fmt: skip

    @property
    def reason(self) -> str | None:
        """Reason, as text, why the run stopped before its last step without failing, or why `observe` recorded no step
        of a completed run; None otherwise.
        """
        return self._status().reason

    @property
    def cause(self) -> Cause | None:
        """Cause that ended the run before its last step: ``"requested"``, ``"killed"``, ``"not-started"``,
        ``"terminated"`` (its agent received SIGTERM), ``"driver-ended"``, ``"directory-gone"`` or
        ``"recording-stopped"`` (by `observe`; the training continued). None for an error in a rank, and for runs from
        versions that did not record the cause.
        """
        return self._status().cause

    def _status(self) -> Status:
        status, problem = self._read_status()
        if status is None and self._is_gone():
            return self._without_directory()
        status = self._last_status = status or self._last_status
        if status is None:
            return self._without_status(problem)
        if status.state in FINAL_STATES:
            return status
        if _lives(status):
            # only the process that has created the directory knows that its agent cannot write there either
            is_lost = status.state == "starting" and driver.is_own(status.pid) and self._dir.is_read_only()
            return self._not_started(status) if is_lost else status
        # the agent may have written the final status just before it ended
        return self._after_its_agent(self._read_status()[0] or status)

    def _after_its_agent(self, status: Status) -> Status:
        if status.state in FINAL_STATES:
            return status
        is_read_only = self._dir.is_read_only()  # for this process, and perhaps for the agent as well
        said = self._as_ranks_ended() if is_read_only and status.state == "running" else None
        if said is not None:
            return replace(status, state=said)
        return self._record_lost_agent(status, is_read_only=is_read_only)

    def _as_ranks_ended(self) -> str | None:
        """Return the state with which all ranks have ended; None if some have not ended, or if the states differ."""
        events = of_last_attempt(self.events())
        ends = {event["rank"]: event["state"] for event in select(events, "end", None)}
        are_all = ends.keys() == {event["rank"] for event in select(events, "process", None)}
        return ends[min(ends)] if are_all and len({*ends.values()}) == 1 else None

    def _read_status(self) -> tuple[Status | None, str]:
        """Return the content of `status.json` (None if it cannot be read), and the reason to report if it is None."""
        try:
            return self._dir.read_status(), "it has no status.json"
        except RunUnreadable as error:
            return None, str(error)

    def _is_gone(self) -> bool:
        try:
            return not holds_run(self.path)
        except RunUnreadable:
            return False  # private to another user, but it exists

    def _without_directory(self) -> Status:
        """Return the status of a run whose directory was deleted or moved: failed, after its agent has ended."""
        last = self._last_status
        if last is not None and (last.state in FINAL_STATES or (last.state == "running" and _lives(last))):
            return last
        error = {"message": self._dir.is_gone_message()}
        return Status("failed", 0, 0.0, t=time.time(), error=error, cause=Cause.DIRECTORY_GONE)

    def _not_started(self, status: Status) -> Status:
        """Return the status of a run whose agent cannot even write that it has started the ranks."""
        message = (
            f"run {self.id} could not be started: its directory {self.path} cannot be written any more; make it "
            f"writable, or set {ROOT_VARIABLE} to another folder, and launch the job again"
        )
        return replace(status, state="failed", error={"message": message}, cause=Cause.NOT_STARTED)

    def _without_status(self, why: str) -> Status:
        """Return the status of a run without a readable `status.json`: the status in its events, or else failed."""
        ends = {event["state"] for event in self.events("end")}
        if len(ends) == 1:
            return Status(ends.pop(), 0, 0.0, t=time.time())
        unknown = {"message": f"it is unknown how run {self.id} ended: {why}", "step": self._last_step()}
        return Status("failed", 0, 0.0, t=time.time(), error=self._first_error() or unknown)

    def _first_error(self, *, causes_only: bool = False) -> dict[str, Any] | None:
        """Return the first error of any rank since the last restart; root causes before errors about a lost peer.

        With `causes_only`, errors that only report a lost peer are ignored. Return None if there is no error.
        """
        errors = [
            event
            for event in select(of_last_attempt(self.events()), "error", None)
            if not (causes_only and is_secondary_failure(event))
        ]
        if not errors:
            return None
        first = min(errors, key=is_secondary_failure)
        return {**first, "message": f"rank {first['rank']} failed: {first['type']}: {first['message']}"}

    def _record_lost_agent(self, status: Status, *, is_read_only: bool) -> Status:
        or_silent = f", or could not write how: {self.path} cannot be written here" if is_read_only else ""
        message = (
            f"the agent of run {self.id} (process {status.pid}) was killed before the run ended{or_silent}; "
            "its ranks ended with it, and everything that they had written is kept"
        )
        if isinstance(self.job, ObservedJob):
            message = (
                f"process {status.pid}, observed by run {self.id}, ended before its training loop was complete; "
                "everything that its ranks had written is kept"
            )
        cause = Cause.KILLED
        if status.state == "starting":
            cause = Cause.NOT_STARTED
            message = f"run {self.id} could not be started: the launch server (process {status.pid}) ended"
        own = self._first_error(causes_only=True)
        error = own or {
            "message": message, "rank": None, "step": self._last_step(), "strategy": self.job.strategy.label,
            "traceback": self._server_log(),
        }  # fmt: skip
        lost = replace(status, state="failed", error=error, cause=None if own else cause)
        if not own and self._dir.stop_request.exists():
            lost = replace(status, state="stopped", reason="asked to stop", cause=Cause.REQUESTED)
        with contextlib.suppress(OSError):  # in a read-only directory, the result is still returned
            self._dir.write_json("status.json", asdict(lost))
        return lost

    def _server_log(self) -> str:
        return read_tail(self.path / "logs" / "server.log", most=4000)

    def _last_step(self) -> int:
        return max((event["step"] for event in self.events("step")), default=0)

    # What is said about the run.

    @property
    def group(self) -> str:
        """Group of the run, as given at its launch or set here; by default, it is derived from model and data.

        Only runs of one group share a plot in the labs. None or an empty string restores the default.
        """
        return read_about(self._dir.path).group or f"{label_of(self.job.model)} on {label_of(self.job.data)}"

    @group.setter
    def group(self, name: str | None) -> None:
        self._write_about(group=name)

    @property
    def note(self) -> str:
        """Your note on the run; empty if there is none. Stored in the run directory, beside the job."""
        return read_about(self._dir.path).note

    @note.setter
    def note(self, text: str | None) -> None:
        self._write_about(note=text)

    @property
    def baseline(self) -> str | None:
        """Id of the run that this run is compared with, such as the run whose suggested change it tries; else None."""
        return read_about(self._dir.path).baseline or None

    @baseline.setter
    def baseline(self, run_id: str | None) -> None:
        self._write_about(baseline=run_id)

    @property
    def made_by(self) -> str | None:
        """Name of the tool that launched the run for its own measurement, such as ``check``; None for your runs."""
        return read_about(self._dir.path).made_by or None

    @property
    def faults(self) -> Faults:
        """The plan of faults of the run, including those injected later; empty if it has none."""
        return self._dir.read_faults()

    @property
    def predicted(self) -> LaunchPrediction | None:
        """The step time predicted at the launch; None if it was not predicted, as on GPUs or for your own model."""
        return LaunchPrediction.of_run(self._dir)

    @property
    def stored_summary(self) -> Summary | None:
        """Summary that was written when the run ended, without reading the events; None if there is none.

        `Run.summary` computes it from the events.
        """
        return self._dir.read_summary()

    def _write_about(self, **changes: str | None) -> None:
        """Change fields of `about.json`.

        Raises:
            RunUnreadable: The run directory cannot be written.
        """
        try:
            write_about(self._dir, **changes)
        except OSError as error:
            raise RunUnreadable(f"run {self.id} cannot be changed: {error.strerror}") from None

    def delete(self) -> None:
        """Delete the run directory with everything that the run has recorded; this cannot be undone.

        Raises:
            SpecError: The run has not ended.
            RunUnreadable: The directory cannot be deleted.
        """
        if self.is_alive:
            raise SpecError(f"run {self.id} has not ended; stop it with run.stop(), then delete it")
        try:
            shutil.rmtree(self._dir.path)
        except OSError as error:
            raise RunUnreadable(f"run {self.id} cannot be deleted: {error.strerror}") from None

    # Waiting for the run, stopping and changing it, from any process: requests are files in its directory.

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
        """Inject more faults into this run, which must be running; faults known beforehand can be passed to `launch`.

        A fault whose step has passed occurs before the next step. The ranks notice new faults within a tenth of a
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
                f"run {self.id} records a training script (ss.observe), in which no faults can be "
                "injected; launch a job"
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

    @property
    def world_size(self) -> int:
        """Number of ranks that train now, or that took the last step of a run that has ended."""
        return self.reduced().world_size

    @property
    def resized_job(self) -> Job:
        """The job on the current number of ranks (`Job.at_size`); the job itself, unless the run was resized."""
        return self.job if self.job.elastic is None else self.job.at_size(self.world_size)

    def resize(self, world_size: int) -> Self:
        """Continue with another number of ranks after the step in progress, and return at once.

        The ranks save a checkpoint (with `Recovery.replica_every`, a copy in memory) and end; `world_size` new ranks
        load it, with model, optimizer and data divided anew, and take the next step, so no step is lost. Only if the
        copy is corrupt are the steps since the newest checkpoint repeated; the event `resume` says why. If the new
        ranks cannot start, the run continues with the former number, and the event `restart` says why. A later call
        replaces an earlier request that no rank has seen. A run that reaches its last step first ends as usual.

        Raises:
            DataError: A batch that is scaled with the number of ranks would be larger than the data.
            SpecError: The job is not elastic or cannot train on this number of ranks, the run has ended, or its ranks
                were started by torchrun, where nodes join and leave instead.
            RunUnreadable: The run directory cannot be written.

        Example:
            >>> run = ss.launch(ss.Job(model="mlp", data="digits", world_size=2, elastic="2:4"))  # doctest: +SKIP
            >>> run.resize(4).wait().summary().world_sizes  # doctest: +SKIP
            '2 → 4'
        """
        try:
            job = self.job.at_size(index(world_size))  # refuses a number of ranks that the job does not suit
        except TypeError:
            raise SpecError(
                f"world_size={quoted(world_size)} is not a whole number; give 4, for example"
            ) from None
        require_batch(job)
        if isinstance(job.strategy, Pipeline):
            for event in self.events("pipeline_layers")[-1:]:  # which only ranks know of a user's model
                job.strategy.check_depth(event["count"], job.world_size, of="the model")
        if not self.is_alive:
            raise SpecError(
                f"run {self.id} has ended; resume it with another number of ranks: "
                f"ss.launch(run.job.at_size({world_size}), resume=run)"
            )
        if self._dir.by_torchrun.exists():
            raise SpecError(
                f"the ranks of run {self.id} were started by torchrun; start it on more nodes, or end it on some, "
                "instead of calling resize"
            )
        try:
            self._dir.request_resize(world_size)
        except OSError as error:
            raise RunUnreadable(f"run {self.id} cannot be resized: {error.strerror}") from None
        return self

    # Data of the run.

    def events(self, kind: str | None = None, rank: int | None = None) -> list[Event]:
        """Return all events so far, ordered by time.

        Args:
            kind: Only events of this kind, such as ``"step"`` or ``"eval"``; None returns all kinds.
            rank: Only events of this rank; None returns all ranks.
        """
        with self._reading_whole():
            self._events.extend(self._tail.poll())
            return select(self._events, kind, rank)

    def reduced(self) -> RunLog:
        """Return the run's events so far, reduced to columns and totals; each call reads only the new events."""
        with self._reading_whole():
            if self._log is None:
                self._log = RunLog.of(self.job)
            for batch in self._log_tail.batches():
                self._log.feed(batch)
            return self._log

    @contextlib.contextmanager
    def _reading_whole(self) -> Iterator[None]:
        """Context manager that excludes other threads. If it is interrupted, the next call reads all events again."""
        with self._reading:
            try:
                yield
            except BaseException:
                self._read_again()
                raise

    @property
    def problems(self) -> tuple[str, ...]:
        """Messages about unreadable parts of the run's logs, such as the truncated last line of a killed rank."""
        self.reduced()
        lines = self._log_tail.num_unreadable
        told = f"{plural(lines, 'line')} of the run's logs cannot be read as events"
        newer = f"job.json has fields from a newer version, which are ignored: {', '.join(self.job.left_out)}"
        return (
            *self._log_tail.problems.values(),
            *([told] if lines else []),
            *([newer] if self.job.left_out else []),
        )

    def tail(self) -> Tail:
        """Return an incremental reader. Its first `poll` returns all events so far; later polls return new events."""
        return Tail(self.path)

    def metrics(self) -> pd.DataFrame:
        """Return a data frame with one row for each step that all ranks have finished.

        Columns: step, t (Unix seconds), loss (mean over ranks), step_time_s (slowest rank), samples_per_s,
        tokens_per_s, lr, grad_norm, sent_bytes (sum over ranks), process_bytes_now and process_bytes (growth of
        the memory of the process since before the model was built, at the end of the step and at its peak so far;
        maximum over ranks), world_size (number of ranks that took the step).
        """
        from shardscope.runlog.frames import metrics_frame

        with self._reading:
            return metrics_frame(self.reduced())

    def timeline(self) -> pd.DataFrame:
        """Return a data frame with one row for each span.

        Columns: rank, step, lane, name, start_s and end_s (in seconds since the first span), bytes.
        """
        from shardscope.runlog.frames import timeline_frame

        return timeline_frame(self.events("step"))

    def step_events(self, step: int | None = None) -> StepEvents | None:
        """Return the computations, messages and memory of one recorded step; None if there is none yet.

        Args:
            step: Number of a step after the last resize; None returns the step whose messages were recorded
                (`Record.messages_first`).
        """
        from shardscope.runlog.recorded_step import recorded_step

        return recorded_step(self.resized_job, self.events(), self.name, step=step)

    def memory(self) -> pd.DataFrame:
        """Return a data frame with one row for each rank and step in which memory was measured by type.

        See `Record.memory_first`. Columns: rank, step, and the rank's peak memory in that step, in bytes, for
        parameters (its own or its shards, with the model's buffers), gradients, optimizer (state), activations (saved
        for the backward pass), gathered (parameters of other ranks) and buffers (for communication, padding and
        scratch). The types need not peak at the same time.
        """
        from shardscope.runlog.frames import memory_frame

        return memory_frame(self.events("memory"))

    def noise_scale(self, smoothing: float = 0.99) -> NoiseScale:
        """Return the gradient noise scale at the steps at which it was measured (see `Record.noise_scale`).

        Args:
            smoothing: Decay factor of the moving averages, 0 < value < 1; 0.99 averages over about 100 steps.

        Raises:
            SpecError: The run does not measure the noise scale, or `smoothing` is out of range.
        """
        from shardscope.analytic.large_batch.noise_scale import batches_compared, noise_scale_from

        if not self.job.record.noise_scale:
            raise SpecError(
                f"run {self.id} does not measure its noise scale; launch it with record=Record(noise_scale=True)"
            )
        with self._reading:
            return noise_scale_from(self.reduced().noise, *batches_compared(self.job), smoothing=smoothing)

    def layers(self) -> Layers:
        """Return trust ratios and norms by layer, error-feedback residuals, and alarms (see `Record.layers_every`).

        Raises:
            SpecError: The run has neither trust ratios nor residuals, or does not record layer statistics.
        """
        job = self.job
        if not reports_layers(job):
            raise SpecError(
                f"run {self.id} has no trust ratios with optimizer={job.optimizer.name!r} and no residuals with "
                f"compression={job.compression.name!r}; use lamb or lars, or compression with error feedback"
            )
        if not job.record.layers_every:
            raise SpecError(
                f"run {self.id} does not record layer statistics; launch it with record=Record(layers_every=10)"
            )
        return layers_of(self.events("layers"), job.optimizer)

    def summary(self) -> Summary:
        """Return the summary of the run so far."""
        state = self.state
        with self._reading:
            return summarise(self.reduced(), state, self.job)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the weights after a step that the run has saved: whole tensors by name, as of the plain model.

        The weights come from a checkpoint or, after the last step, from the parameters that `Record(parameters=True)`
        saves, which lack buffers. If ranks trained separate models, the result is the mean of these.

        Args:
            step: A step after which the run saved its weights; None returns the last such step.

        Raises:
            CheckpointError: The run has not saved its weights after this step, or they are corrupt.

        Example:
            >>> model.load_state_dict(run.state_dict())  # doctest: +SKIP
        """
        from shardscope.runtime.record.weights import state_dict_of

        return state_dict_of(self, step)

    def export(self, path: str | Path, *, format: str | None = None) -> str:  # noqa: A002 - as in pandas and PIL
        """Export the run for another tool, and return the path or address of the result.

        Args:
            path: File or folder to write; for ``mlflow`` also the URI of a tracking server.
            format: None for the newest saved weights, to a path that ends in ``.pt`` or ``.safetensors``; else
                ``"pt"``, ``"safetensors"``, ``"parquet"`` (a folder of tables: steps, spans, traffic),
                ``"chrome-trace"`` (a JSON file of all spans, for ui.perfetto.dev), ``"tensorboard"``, ``"wandb"``
                (offline unless WANDB_MODE says otherwise) or ``"mlflow"``. Every format except ``pt`` and the Chrome
                trace needs its own library.

        Raises:
            SpecError: There is no such format, its library is not installed, or the run has no data for it.
            CheckpointError: The run has saved no weights, or they are corrupt.

        Example:
            >>> run.export("run.json", format="chrome-trace")  # doctest: +SKIP
        """
        from shardscope.runtime.export import export_run

        return export_run(self, path, format=format)

    def logs(self, rank: int | None = None) -> str:
        """Return the stdout and stderr of a rank, or of the agent if `rank` is None."""
        return "".join(map(read_tail, self._dir.log_files(rank)))

    def __repr__(self) -> str:
        return f"<Run {self.id} {self.state}>"

    def _repr_html_(self) -> str:
        from shardscope.runtime.record.card import run_html

        return run_html(self)


def _lives(status: Status) -> bool:
    """Return whether the process in charge of a run is alive; a process on another machine is assumed to be alive."""
    return status.host != this_host() or is_alive(status.pid, status.process_started)
