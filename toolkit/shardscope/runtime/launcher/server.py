"""The launch server, one per driver: a process with torch imported, from which the agent of every run is forked.

Importing torch takes seconds; forking a process that has imported it takes milliseconds. So the first launch of a
driver (a notebook's kernel, a script, the command line) starts this server in a separate session, and each run is a
request to it, one line of JSON on its standard input:

    driver ── stdin ──▶ server ── fork ──▶ agent of a run ── forkserver ──▶ ranks

The server itself starts no thread and does not train. When the driver ends, for whatever reason, the server's standard
input closes. The server then ends the runs that were not launched with `detach`, waits for the others, and exits.
Each agent has one end of a pipe whose other end only the server has. So an agent notices if the server dies, and can
tell this apart from the end of the driver.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NEEDED = ("numpy.ma", "torch._dynamo", "shardscope.runtime.agent.agent", "shardscope.runtime.worker")
_MOST_TRACE_S = 90
"""Time limit of a trace, in seconds; the driver stops waiting earlier."""
_TRACE = "shardscope.prediction._torch_trace"
_LATER = (
    _TRACE,
    "shardscope.training.checkpoint",
    "shardscope.methods.strategies.pipeline._torch_stage",
    "shardscope.training.strategies.fully_sharded",
)
"""Modules imported while the server is idle: most runs never need them, so the first launch does not wait for them."""
DRIVER_ENDED = b"d"
"""Byte that an agent reads from its pipe when the driver has ended. If the pipe just closes, the server has died."""


@dataclass
class Server:
    """The server loop and its state: the pids of live agents and tracing children, and the pipe to each agent."""

    driver_lives: Callable[[], bool]
    lifelines: dict[int, int] = field(default_factory=dict)
    runs: dict[int, str] = field(default_factory=dict)
    """Pids of agents, with the run directory of each."""
    detached: set[int] = field(default_factory=set)
    tracing: dict[int, str] = field(default_factory=dict)
    """Pids of tracing children, with the answer file that each child must write."""
    later: list[str] = field(default_factory=lambda: list(_LATER))
    _pending: bytes = b""

    def serve(self) -> None:
        """Serve requests until the driver has ended, then end its runs and wait for detached ones."""
        while self._is_wanted():
            self._reap()
        for pid in set(self.lifelines) - self.detached:
            lifeline = self.lifelines.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # the agent has already ended
                os.write(lifeline, DRIVER_ENDED)
            os.close(lifeline)
        while self.lifelines or self._has_children():
            signal.sigtimedwait([signal.SIGCHLD], 0.2) if hasattr(signal, "sigtimedwait") else select.select(
                [], [], [], 0.2
            )
            self._reap()

    def _is_wanted(self) -> bool:
        ready, _, _ = select.select([0], [], [], 0.25)
        if not ready:
            self._import_next()
            return self.driver_lives()
        chunk = os.read(0, 1 << 20)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            with contextlib.suppress(
                ValueError
            ):  # a request truncated by an interrupt, which its driver has reported
                request = json.loads(line)
                self._fork_trace(request) if "trace" in request else self._launch(request)
        return bool(chunk)

    def _import_next(self) -> None:
        if self.later:
            _import(self.later.pop())

    def _launch(self, request: dict[str, Any]) -> None:
        """Fork an agent; if forking fails, this run fails, but the server's other runs continue."""
        try:
            self._fork_agent(request)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of a module to import, or no process can be created
            traceback.print_exc()
            _record_failure(request["run"], f"the agent could not start: {error}")

    def _fork_agent(self, request: dict[str, Any]) -> None:
        from shardscope.runtime.record import provenance

        _import(*(module for module in request["imports"] if module not in sys.modules))
        read, write = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if pid == 0:
            os.close(write)
            self._become_agent(request, read)
        provenance.look_up()  # for the next agents; this launch does not wait for it
        os.close(read)
        self.lifelines[pid], self.runs[pid] = write, request["run"]
        if request["detach"]:
            self.detached.add(pid)

    def _fork_trace(self, request: dict[str, Any]) -> None:
        """Fork a child that traces a step of a job and writes the result to a file."""
        try:
            _import(_TRACE)
            pid = os.fork()
        except OSError as error:
            _refuse(Path(request["answer"]), f"the job's model could not be traced: {error}")
            return
        if pid:
            self.tracing[pid] = request["answer"]
        else:
            code = 1
            signal.alarm(_MOST_TRACE_S)
            try:
                for other in self.lifelines.values():
                    os.close(other)
                from shardscope.prediction._torch_trace import answer

                answer(request["trace"], Path(request["answer"]))
                code = 0
            except BaseException:  # noqa: BLE001 - nothing above can handle it in a forked child
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _become_agent(self, request: dict[str, Any], lifeline: int) -> None:
        """Run the agent in the forked child; does not return."""
        from shardscope.runtime.agent.agent import main

        code = 1
        try:
            for other in self.lifelines.values():
                os.close(other)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            code = main(request, lifeline)
        except BaseException as error:  # noqa: BLE001 - becomes the run's error
            traceback.print_exc()
            sys.stderr.flush()
            _record_failure(request["run"], f"the agent could not start: {error}")
        finally:
            os._exit(code)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, ending = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.detached.discard(pid)
                if pid in self.tracing:
                    _refuse(Path(self.tracing.pop(pid)), "the process that traced the job's model was killed")
                if pid in self.lifelines:
                    os.close(self.lifelines.pop(pid))
                    _require_status(self.runs.pop(pid), os.waitstatus_to_exitcode(ending))

    def _has_children(self) -> bool:
        try:
            return os.waitpid(-1, os.WNOHANG)[0] == 0
        except ChildProcessError:
            return False


def _refuse(path: Path, why: str) -> None:
    """Write an error to the answer file of a tracing child, unless the child has written an answer."""
    with contextlib.suppress(OSError):  # the driver no longer waits, and has deleted the folder
        if path.parent.is_dir() and not path.exists():
            path.write_text(json.dumps({"error": why}))


def _require_status(path: str, code: int) -> None:
    """Write the status of a run whose agent ended without writing it, so that the driver does not wait forever."""
    from shardscope.errors import RunUnreadable
    from shardscope.runtime.record.processes import signal_name
    from shardscope.runtime.record.rundir import RunDir

    status = None
    with contextlib.suppress(RunUnreadable, OSError):
        status = RunDir(Path(path)).read_status()
    if status is not None and status.state == "starting":
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        _record_failure(path, f"the agent {how} before the ranks were started")


def _record_failure(path: str, message: str) -> None:
    """Write to the run's status, which the driver reads, that the ranks could not be started."""
    from shardscope.runtime.record.processes import process_started
    from shardscope.runtime.record.rundir import RunDir
    from shardscope.runtime.record.status import Cause

    details = {"message": message, "traceback": traceback.format_exc() if sys.exc_info()[0] else ""}
    started = process_started()
    with contextlib.suppress(OSError):  # the directory has been deleted, or can no longer be written
        RunDir(Path(path)).write_status(
            "failed", pid=os.getpid(), process_started=started, error=details, cause=Cause.NOT_STARTED
        )


def _import(*modules: str) -> None:
    if not modules:
        return
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # keeps the garbage collector from touching, and thus copying, pages shared with the forks


def import_everything() -> None:
    """Import the modules that agents and ranks need, and the modules that only few runs need."""
    _import(*_NEEDED, *_LATER)


def main() -> None:
    """Import the modules that agents and ranks need, then serve. The driver is the parent process."""
    driver = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import(*_NEEDED)
    Server(lambda: os.getppid() == driver).serve()
    sys.exit(0)
