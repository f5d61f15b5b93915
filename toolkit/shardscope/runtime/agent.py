"""The agent of one run: a process of its own that starts the ranks through PyTorch elastic and sees them out.

It is forked from the launch server with torch already imported, gives itself a forkserver before it has any thread,
and lets elastic start, watch and end the ranks from there. A watcher thread carries out requests to stop, and ends
the run when the server is gone. Whatever happens, the last thing the agent does is to write how the run ended.
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
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardscope._compat import fork_forkserver, started_processes
from shardscope.runtime import rendezvous, worker
from shardscope.runtime.failure import describe_failure
from shardscope.runtime.processes import kill_descendants, process_started
from shardscope.runtime.rundir import RunDir
from shardscope.runtime.summary import write_summary

_POLL_S = 0.05
_PATIENCE_S = 3.0  # with elastic, once the ranks have been killed


def main(request: dict[str, Any], lifeline: int) -> int:
    """Run one job to its end. Returns the exit code: 0 unless the run failed."""
    run = RunDir(Path(request["run"]))
    _move_in(run, request)
    return Agent(run, lifeline, request).run_job()


def _move_in(run: RunDir, request: dict[str, Any]) -> None:
    """Take the driver's surroundings, so that the user's modules are found; print to the run's log."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = (
        "SIGTERM"  # an interrupt means the notebook's cell, not its runs
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    sys.path[:] = request["sys_path"]
    log = os.open(run.path / "logs" / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    fork_forkserver(run.path / "control")


@dataclass
class Agent:
    """One run's agent."""

    run: RunDir
    lifeline: int
    request: dict[str, Any]

    def __post_init__(self) -> None:
        self._me = {
            "pid": os.getpid(),
            "process_started": process_started(),
            "detached": self.request["detach"],
        }
        self._ended_because: str | None = None
        self._over = threading.Event()
        self._ranks: set[BaseProcess] = set()

    def run_job(self) -> int:
        """Start the ranks, wait for them, write how it ended."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.run.stop_request.exists():
            self._ended_because = "asked to stop before it had started"
            self._leave("stopped", None)
            return 0
        self.run.write_status("running", **self._me)
        threading.Thread(target=self._watch, name="watcher", daemon=True).start()
        state, error = self._run_ranks()
        self._over.set()
        self._leave(state, error)
        return 0 if error is None else 1

    def _leave(self, state: str, error: dict[str, Any] | None) -> None:
        kill_descendants(os.getpid())
        (self.run.path / "control" / "forkserver").unlink(missing_ok=True)
        with contextlib.suppress(
            OSError
        ):  # how it ended is worth more than its figures, which can be made again
            write_summary(self.run, state)
        self.run.write_status(state, reason=self._ended_because, error=error, **self._me)

    def _run_ranks(self) -> tuple[str, dict[str, Any] | None]:
        job = self.run.read_job()
        try:
            states = elastic_launch(self._config(job.world_size), worker.main)(
                str(self.run.path), self.request["resume"]
            )
        except SignalException:
            self._ended_because = "its agent received SIGTERM"
        except ChildFailedError as failed:
            if self._ended_because is None:
                return "failed", describe_failure(self.run, job, failed, self._exit_codes())
        except Exception as error:
            if self._ended_because is None:  # else the ranks were killed while elastic was starting them
                traceback.print_exc()
                message = f"the ranks could not be started: {error}"
                return "failed", {"message": message, "traceback": traceback.format_exc()}
        else:
            if "stopped" not in states.values():
                return "completed", None
            self._ended_because = "asked to stop"
        return "stopped", None

    def _exit_codes(self) -> dict[int, int]:
        """How each rank's process ended, by process; elastic itself tells only of those it saw first."""
        self._ranks |= started_processes()
        codes = {process.pid: process.exitcode for process in self._ranks}
        return {pid: code for pid, code in codes.items() if pid is not None and code is not None}

    def _config(self, world_size: int) -> LaunchConfig:
        rendezvous.register()
        return LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=world_size, run_id=self.run.path.name, role="rank",
            rdzv_backend=rendezvous.BACKEND, rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1",
            max_restarts=0, monitor_interval=0.02, start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=str(self.run.path / "logs"), redirects=Std.ALL),
        )  # fmt: skip

    def _watch(self) -> None:
        """Until the run is over: end it when the server is gone, or when the grace of a stop request has run out."""
        deadline: float | None = None
        while not self._over.wait(_POLL_S):
            self._ranks |= started_processes()
            if select.select([self.lifeline], [], [], 0)[0]:
                self._end("the program that launched it ended")
                return
            if deadline is None:
                grace = self.run.read_json("control/stop")
                deadline = None if grace is None else time.monotonic() + float(grace)
            elif time.monotonic() > deadline:
                self._end("asked to stop; the ranks did not reach the end of a step in time and were killed")
                return

    def _end(self, reason: str) -> None:
        """Kill the ranks, also those that are only being started; do not wait for elastic longer than need be."""
        self._ended_because = reason
        deadline = time.monotonic() + _PATIENCE_S
        while not self._over.is_set() and time.monotonic() < deadline:
            kill_descendants(os.getpid())
            self._over.wait(_POLL_S)
        if not self._over.is_set():
            faulthandler.dump_traceback()
            self._leave("stopped", None)
            os._exit(0)
