"""The agent of one run: a separate process that starts the ranks through PyTorch elastic and waits until they end.

It is forked from the launch server with torch already imported, and starts a forkserver before it starts any thread.
Elastic starts, watches and ends the ranks through this forkserver. A watcher thread handles stop requests, and ends the
run when the server has died or the run directory is missing. In every case, the agent's last action is to write the
final status.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardscope._compat import (
    PIPE_CLOSED,
    ended_forkserver,
    fork_forkserver,
    forkserver_ended_with,
    forkserver_pid,
    known_exit_codes,
    started_processes,
)
from shardscope.errors import RunUnreadable, ShardscopeError
from shardscope.runlog import clock
from shardscope.runlog.files import OutOfReach
from shardscope.runtime import worker
from shardscope.runtime.agent import rendezvous
from shardscope.runtime.agent.failure import (
    BY_AGENT,
    Ending,
    describe_failure,
    describe_lost_forkserver,
    describe_silent_end,
)
from shardscope.runtime.agent.left_behind import Left, LeftBehind, living
from shardscope.runtime.agent.replicas import ReplicaMemory, keep_newest, memory_for
from shardscope.runtime.agent.resizing import cannot_start, next_size
from shardscope.runtime.agent.restarts import Restarts, ResumePoint
from shardscope.runtime.launcher import server
from shardscope.runtime.record import provenance
from shardscope.runtime.record.launch_prediction import LaunchPrediction
from shardscope.runtime.record.processes import (
    end_processes_of,
    end_ranks_of,
    kill_descendants,
    process_started,
    remove_gpu_files,
)
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.status import Cause
from shardscope.spec import Job

_POLL_S = 0.05
_PROVENANCE_S = 2.0  # maximum time to wait for the provenance record when the run ends, in seconds
_PATIENCE_S = 3.0  # maximum time that elastic may take to return after the ranks have been killed, in seconds


def main(request: dict[str, Any], lifeline: int) -> int:
    """Run one job to its end and return the exit code: 0 unless the run failed."""
    run = RunDir(Path(request["run"]))
    move_in(run, request)
    memory, why_not = memory_for(run)
    if request["emulated"]:
        from shardscope.runtime.emulated.coordinator import start_nodes  # builds on this module

        return start_nodes(run, lifeline, request, memory, why_not).run_job()
    if memory is not None:
        os.environ.update(memory.env())  # for the ranks, which inherit it from the forkserver
    fork_forkserver(run.path / "control")
    return Agent(run, lifeline, request, memory, why_not).run_job()


def move_in(run: RunDir, request: dict[str, Any]) -> None:
    """Adopt the driver's working directory, environment and module search path; redirect output to the agent's log."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = (
        "SIGTERM"  # an interrupt is meant for the notebook's cell, not for its runs
    )
    clock.start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    sys.path[:] = request["sys_path"]
    log = os.open(run.path / "logs" / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


@dataclass
class Agent:
    """The agent of one run.

    Attributes:
        run: The run directory.
        lifeline: File descriptor of the pipe from the launch server; it becomes readable if the driver or server ends.
        request: The launch request: run directory, checkpoint to resume from, environment and options.
        memory: Memory in which the ranks keep copies of their state; None if they keep none.
        not_started: Why the ranks cannot be started; an empty string if they can.
    """

    run: RunDir
    lifeline: int
    request: dict[str, Any]
    memory: ReplicaMemory | None = None
    not_started: str = ""

    def __post_init__(self) -> None:
        self._me: dict[str, Any] = {
            "pid": os.getpid(),
            "process_started": process_started(),
            "detached": self.request["detach"],
        }
        self._server = os.getppid()
        self._folder = os.open(self.run.path, os.O_RDONLY | os.O_DIRECTORY)
        self._cut: Ending | None = None  # set if this agent ended the run before the ranks had finished
        self._over = threading.Event()
        self._lost_forkserver = False
        self._parked = threading.Lock()  # held by the watcher while it works
        self._ranks: set[BaseProcess] = set()
        self._behind: LeftBehind | None = None  # while elastic runs
        self._left_behind: set[int] = set()  # pids of ranks that this agent has killed for that reason
        self._started_at = time.time()
        self._recorder = threading.Thread(target=self._record_provenance, name="provenance", daemon=True)

    def run_job(self) -> int:
        """Start the ranks, wait for them, and write how the run ended. Return the exit code."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.run.stop_request.exists():
            self._leave(Ending("stopped", "asked to stop before it started", cause=Cause.REQUESTED))
            return 0
        self.run.write_status("running", **self._me)
        self._recorder.start()
        threading.Thread(target=self._watch, name="watcher", daemon=True).start()
        ending = self._run_ranks()
        self._over.set()
        if ending.state == "failed" and self._is_lost():
            ending = self._lost()  # the errors of the ranks are only a consequence
        self._leave(ending)
        return 1 if ending.state == "failed" else 0

    def _leave(self, ending: Ending) -> None:
        """End all processes of the run and write the final status to its directory, even if the directory was moved."""
        if self._recorder.ident is not None:
            self._recorder.join(_PROVENANCE_S)
        end_processes_of(os.getpid())  # first: readers of a final status rely on the ranks having ended
        remove_gpu_files(self._rank_pids(), since=self._started_at)
        os.fchdir(self._folder)
        run = RunDir(Path())
        if self.memory is not None:
            if ending.state != "completed":
                ending = keep_newest(run, self.memory, ending)
            self.memory.remove()
        Path("control", "forkserver").unlink(missing_ok=True)
        with contextlib.suppress(
            OSError, ShardscopeError
        ):  # the summary can be recomputed, the final status cannot
            LaunchPrediction.write_end(run)
            run.write_summary(ending.state)
        with contextlib.suppress(FileNotFoundError):  # the directory has been deleted
            run.write_status(**asdict(ending), **self._me)

    def _record_provenance(self) -> None:
        with contextlib.suppress(OSError, ShardscopeError):  # a full disk must not end the run
            provenance.record(self.run, command=self.request["command"], seed=self.run.read_job().seed)

    def _run_ranks(self) -> Ending:
        """Run the ranks to their end; restart them after a resize, and after failures as the job's recovery
        specifies.
        """
        launched = job = self.run.read_job()
        restarts = Restarts(self.run, job.recovery, self.request["resume"], memory=self.memory)
        source = ResumePoint(self.request["resume"])
        former: Job | None = None  # before a resize whose ranks have not ended yet
        try:
            while not self.not_started:
                began_t, ending = clock.now(), self._attempt(job, source)
                failed_t, size = clock.now(), next_size(self.run, launched, job.world_size, ending)
                if size is not None:
                    former, job, source = job, launched.at_size(size), restarts.source()
                    continue
                if former is not None and not self._cut and cannot_start(self.run, ending, began_t):
                    job, source = former, restarts.source()
                else:
                    following = None if self._cut else restarts.after(ending)
                    if following is None:
                        return self._cut or restarts.ended(ending)
                    source, job = (
                        following,
                        launched.at_size(restarts.size_after(launched, job.world_size, ending)),
                    )
                former = None
                self._clear_away()
                restarts.note(ending, source, failed_t, job.world_size)
                self._me["restarts"] = restarts.count
                with contextlib.suppress(OSError):  # a full disk must not end a run that can go on
                    self.run.write_status("running", **self._me)
                try:
                    self._renew(source)
                except OSError as error:
                    return self._cut or _not_started(f"the ranks could not be started again: {error}")
            return self._cut or _not_started(self.not_started)
        except SignalException:
            return self._cut or Ending("stopped", "its agent received SIGTERM", cause=Cause.TERMINATED)

    def _clear_away(self) -> None:
        """End the remaining processes of an attempt's ranks, and remove their files."""
        self._recorder.join(_PROVENANCE_S)  # its helpers are not the ranks'
        end_ranks_of(os.getpid(), spared=self._helpers())
        self._ranks |= started_processes()
        remove_gpu_files(self._rank_pids(), since=self._started_at)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Pause the watcher in this context, so that the agent can fork; yields False if the run is being ended."""
        with self._parked:
            yield self._cut is None

    def _helpers(self) -> set[int]:
        """Return the pids of the processes that outlive the ranks of an attempt."""
        forkserver = forkserver_pid()
        return set() if forkserver is None else {forkserver}

    def _renew(self, _source: ResumePoint) -> None:
        """Replace the forkserver if it has ended, before the ranks are restarted."""
        if self._lost_forkserver or ended_forkserver() is not None:
            self._lost_forkserver = False
            with self._alone():
                (self.run.path / "control" / "forkserver").unlink(missing_ok=True)
                fork_forkserver(self.run.path / "control")

    def _attempt(self, job: Job, source: ResumePoint) -> Ending:
        """Start the ranks from `source` and wait for them."""
        self._behind = LeftBehind(self.run, earlier={*self._rank_pids()})
        try:
            states = elastic_launch(self._config(job.world_size), worker.main)(
                str(self.run.path),
                source.resume,
                self.request["code"],
                self.request["modules"],
            )
        except ChildFailedError as failed:
            codes = self._exit_codes()
            by_elastic = [failure.exitcode for failure in failed.failures.values()]
            return (
                self._cut
                or self._without_forkserver(job, [*codes.values(), *by_elastic])
                or describe_failure(self.run, job, failed, codes)
            )
        except SignalException:
            raise
        except Exception as error:  # noqa: BLE001 - becomes the run's error
            traceback.print_exc()
            is_closed = [PIPE_CLOSED] if isinstance(error, OSError | EOFError) else []
            return (
                self._cut
                or self._without_forkserver(job, is_closed)
                or _not_started(f"the ranks could not be started: {error}", traceback.format_exc())
            )
        finally:
            # Without the lock, the watcher could still be killing when the next attempt has started its ranks.
            with self._parked:
                self._behind = None
        if "stopped" in states.values():
            return Ending("stopped", "asked to stop", cause=Cause.REQUESTED)
        return Ending("completed")

    def _without_forkserver(self, job: Job, exit_codes: Sequence[int]) -> Ending | None:
        """Return the ending of the run if the forkserver of the ranks has ended; None if it is alive."""
        ended = forkserver_ended_with(exit_codes)
        self._lost_forkserver = ended is not None
        return None if ended is None else describe_lost_forkserver(self.run, job, *ended)

    def _exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the rank processes by pid; elastic reports only the first failures it noticed."""
        self._ranks |= started_processes()
        codes = {process.pid: process.exitcode for process in self._ranks}
        return {
            pid: BY_AGENT if pid in self._left_behind else code
            for pid, code in codes.items()
            if pid is not None and code is not None
        }

    def _config(self, world_size: int) -> LaunchConfig:
        rendezvous.register()
        return LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=world_size, run_id=self.run.path.name, role="rank",
            rdzv_backend=rendezvous.BACKEND, rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1",
            max_restarts=0, monitor_interval=0.02, start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=str(self.run.path / "logs"), redirects=Std.ALL),
        )  # fmt: skip

    def _watch(self) -> None:
        """Watch the run; end it if the driver or server has ended, its directory is gone or the grace period is over.

        Returns when the run has ended.
        """
        deadline: float | None = None
        while not self._over.wait(_POLL_S):
            with self._parked:
                self._ranks |= started_processes()
                ending = self._cut_short() or self._after_silent_end()
                if ending is None and deadline is None:
                    grace = self._grace_s()
                    deadline = None if grace is None else time.monotonic() + grace
                elif ending is None and deadline is not None and time.monotonic() > deadline:
                    why = "asked to stop; the ranks did not reach the end of a step in time and were killed"
                    ending = Ending("stopped", why, cause=Cause.REQUESTED)
                self._cut = ending
            if ending is not None:
                self._end(ending)
                return

    def _cut_short(self) -> Ending | None:
        """Return how the run ends if its driver or server has ended, or its directory is missing; else None."""
        if select.select([self.lifeline], [], [], 0)[0]:
            return self._left_alone()
        return self._lost() if self._is_lost() else None

    def _after_silent_end(self) -> Ending | None:
        """Kill the peers of silently ended ranks, so that elastic returns; return the ending if no rank is left."""
        behind = self._behind
        left = Left.NONE if behind is None else behind.look(known_exit_codes(self._ranks))
        if left is Left.SOME:
            self._left_behind |= living(self._rank_pids())  # before elastic can notice that they are killed
            end_ranks_of(os.getpid(), spared=self._helpers())
        if left is not Left.ALL:
            return None
        return describe_silent_end(self.run, self.run.read_job(), self._rank_pids())

    def _rank_pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    def _grace_s(self) -> float | None:
        """Return the grace period of a stop request, in seconds; None without a request, 0 if its file is corrupt.

        If the file exists but cannot be opened, for example because no file descriptors are left, the result is None:
        the run continues, and the next poll reads the file again.
        """
        try:
            grace = self.run.read_json("control/stop")
        except (OSError, OutOfReach):
            return None
        except RunUnreadable:
            return 0.0
        if grace is None:
            return None
        return float(grace) if isinstance(grace, int | float) else 0.0

    def _left_alone(self) -> Ending:
        """Return how the run ended, after the pipe from the launch server has become readable.

        The server writes `DRIVER_ENDED` to the pipe if the driver has ended; otherwise the server itself has died.
        """
        if os.read(self.lifeline, 1) == server.DRIVER_ENDED:
            return Ending("stopped", "the program that launched it ended", cause=Cause.DRIVER_ENDED)
        message = (
            f"the launch server of run {self.run.path.name} (process {self._server}) was killed, by hand or by the "
            "system because memory ran out; its ranks ended with it, and the next launch starts another server"
        )
        return Ending("failed", error={"message": message}, cause=Cause.KILLED)

    def _is_lost(self) -> bool:
        """Return whether the run directory was deleted, moved, or replaced by another one."""
        try:
            return not os.path.samestat(self.run.path.stat(), os.fstat(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # unreachable at the moment, but not necessarily deleted

    def _lost(self) -> Ending:
        error = {"message": self.run.is_gone_message()}
        return Ending("failed", error=error, cause=Cause.DIRECTORY_GONE)

    def _end(self, ending: Ending) -> None:
        """Kill all ranks, including those still starting. Exit if elastic does not return within `_PATIENCE_S`
        seconds.
        """
        self._cut = ending
        deadline = time.monotonic() + _PATIENCE_S
        while not self._over.is_set() and time.monotonic() < deadline:
            kill_descendants(os.getpid())
            self._over.wait(_POLL_S)
        if not self._over.is_set():
            faulthandler.dump_traceback()
            self._leave(ending)
            os._exit(0)


def _not_started(message: str, trace: str = "") -> Ending:
    error = {"message": message, **({"traceback": trace} if trace else {})}
    return Ending("failed", error=error, cause=Cause.NOT_STARTED)
