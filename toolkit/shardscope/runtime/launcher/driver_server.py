"""The driver's handle of its launch server, which is started on first use and restarted if it has ended."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from shardscope.errors import LaunchError, SpecError
from shardscope.runtime.agent.user_modules import beyond_current_folder
from shardscope.runtime.launcher.warm import ForkedServer, fork_server

ServerHandle = subprocess.Popen[bytes] | ForkedServer
PATIENCE_S = 3.0
TRACE_S = 60.0
TOOLKIT = str(Path(__file__).parents[3])
_START_SERVER = "from shardscope.runtime.launcher.server import main; main()"


class LaunchServer:
    """Handle of this process's launch server, which is started on first use and restarted if it has ended."""

    def __init__(self) -> None:
        self._server: ServerHandle | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def server(self, log: Path | None = None) -> ServerHandle:
        """Return the running server; if it has to be started, its output goes to `log`."""
        with self._lock:
            if self._server is None or self._owner != os.getpid() or self._server.poll() is not None:
                failed = isinstance(self._server, ForkedServer) and not self._server.was_forked
                self._server = _start_server(log, may_fork=not failed)
                self._owner = os.getpid()
            return self._server

    def is_own(self, pid: int) -> bool:
        """Return whether a process is this process or its launch server."""
        if pid == os.getpid():
            return True
        with contextlib.suppress(BrokenPipeError):  # the warm process could not fork the server
            return self._server is not None and self._owner == os.getpid() and self._server.pid == pid
        return False

    def request(self, server: ServerHandle, line: bytes) -> bool:
        """Send one request, a line of JSON. Return whether it was sent.

        If the request was not sent, the server has died, and the next call of `server` starts another one.
        """
        assert server.stdin is not None
        with self._lock:
            try:
                server.stdin.write(line + b"\n")
                server.stdin.flush()
            except BrokenPipeError:
                self._server = None
                return False
            return True

    def close(self) -> None:
        """End the server and the runs of this process, except detached ones; wait up to `PATIENCE_S` seconds.

        A server with detached runs ends after these runs have ended.
        """
        with self._lock:
            if self._server is None or self._owner != os.getpid():
                return
            server, self._server = self._server, None
        assert server.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            server.stdin.close()
            server.wait(timeout=PATIENCE_S)


def search_path() -> str:
    """Return the module search path of launch servers, in the form of ``$PYTHONPATH``."""
    asked = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([TOOLKIT, *beyond_current_folder(asked)])


def _start_server(log: Path | None, *, may_fork: bool) -> ServerHandle:
    path = search_path()
    with open(log or os.devnull, "ab") as output:
        forked = fork_server(path, output) if may_fork else None
        return forked or subprocess.Popen(
            [sys.executable, "-P", "-c", _START_SERVER], stdin=subprocess.PIPE, stdout=output, stderr=output,
            start_new_session=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip


driver = LaunchServer()
atexit.register(driver.close)


def warm_up() -> None:
    """Start the launch server, which imports torch in a separate process, so that the first launch waits less.

    Returns at once.

    Example:
        >>> import shardscope as ss
        >>> ss.warm_up()  # doctest: +SKIP
    """
    driver.server()


def trace_on_server(asked: str) -> str:
    """Trace a job, given as JSON, in a child of the launch server, which has imported torch. Return the result as JSON.

    Raises:
        SpecError: The model cannot be traced on the meta device.
        LaunchError: The server was killed, or did not respond in time.
    """
    with tempfile.TemporaryDirectory(prefix="shardscope-trace-") as folder:
        answer, server = Path(folder, "answer"), driver.server()
        request = json.dumps({"trace": asked, "answer": str(answer)}).encode()
        deadline = time.monotonic() + TRACE_S
        sent = driver.request(server, request)
        while sent and server.poll() is None and time.monotonic() < deadline:
            if answer.exists():
                found = answer.read_text()
                if found.startswith('{"error"'):
                    raise SpecError(json.loads(found)["error"])
                return found
            time.sleep(0.005)
    reason = "was killed" if server.poll() is not None else f"traced no step within {TRACE_S:.0f} s"
    raise LaunchError(f"the launch server {reason}; launch the job again")
