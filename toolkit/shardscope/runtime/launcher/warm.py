"""The warm process of JupyterLab, which imports torch before the first kernel starts, and forks launch servers.

A kernel's first launch otherwise waits for a launch server that imports torch, which takes seconds of processor time
just when the kernel imports and builds the first widgets. Linux only; elsewhere, and if a kernel's interpreter or the
settings of its native libraries differ, the kernel starts its launch server from scratch.

    JupyterLab ── stdin ──▶ warm process ── fork ──▶ launch server of a kernel ◀── stdin ── kernel

`start` is for JupyterLab, `fork_server` for kernels, `main` is the process. A kernel sends the pipe for the standard
input of its launch server, which therefore ends with the kernel, whether or not the warm process is still there. The
warm process ends with JupyterLab.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NoReturn

VARIABLE = "SHARDSCOPE_WARM"
"""Environment variable with the warm process's folder, private to the user; kernels inherit it from JupyterLab."""
_NATIVE = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_",
           "LD_", "MALLOC_", "GLIBC_", "PYTHON")  # fmt: skip
"""Prefixes of the environment variables that an interpreter or native libraries read only when they are loaded."""
_CAN_WARM = sys.platform == "linux" and hasattr(os, "pidfd_open")


def start(path: str) -> subprocess.Popen[bytes] | None:
    """Start the warm process of this process, and let the processes that it starts find it. Return at once.

    Args:
        path: Module search path of launch servers, in the form of ``$PYTHONPATH``.

    Returns:
        The warm process, which ends when its standard input is closed; None on systems other than Linux, and with
        Pythons that cannot wait for a process by a descriptor.
    """
    if not _CAN_WARM:
        return None
    folder = Path(tempfile.mkdtemp(prefix="shardscope-warm-"))
    (folder / "card.json").write_text(json.dumps(_identity(path)))
    code = "from shardscope.runtime.launcher.warm import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    os.environ[VARIABLE] = str(folder)
    return process


def _identity(path: str) -> dict[str, Any]:
    """Return the properties that must be equal in JupyterLab and a kernel so that the kernel's server can be forked."""
    native = {name: value for name, value in os.environ.items() if name.startswith(_NATIVE)}
    for name in ("PYTHONPATH", "KMP_DUPLICATE_LIB_OK"):  # `path` has the first; threadpoolctl sets the second
        native.pop(name, None)
    return {
        "python": [sys.prefix, sys.version], "torch": version("torch"), "path": path, "environment": native,
        "changed": max(file.stat().st_mtime_ns for file in Path(__file__).parents[2].rglob("*.py")),
    }  # fmt: skip


class ForkedServer:
    """Handle of a launch server that the warm process forks; it has the attributes of `Popen` that drivers use.

    Args:
        connection: Connection to the warm process, which sends the server's pid and a descriptor that becomes readable
            when the server has ended.
        stdin: File to which the requests for the server are written.
    """

    def __init__(self, connection: socket.socket, stdin: IO[bytes]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pid = self._ending = 0
        self._is_over = False
        self.stdin: IO[bytes] | None = stdin

    @property
    def pid(self) -> int:
        """Pid of the server; the first call waits until the warm process has imported torch.

        Raises:
            BrokenPipeError: The warm process could not fork the server.
        """
        with self._lock:
            self._receive()
            if not self._pid:
                raise BrokenPipeError("the warm process could not fork a launch server")
            return self._pid

    @property
    def was_forked(self) -> bool:
        """Whether the server has been forked successfully."""
        return self._pid > 0

    def _receive(self) -> None:
        """Wait for the warm process's answer, once."""
        if self._pid or self._is_over:
            return
        try:
            text, descriptors, _, _ = socket.recv_fds(self._connection, 64, 1)
        except OSError:  # the warm process was killed
            descriptors = []
        self._connection.close()
        if descriptors:
            self._pid, self._ending = int(text), descriptors[0]
        else:
            self._is_over = True

    def poll(self) -> int | None:
        """Return None while the server is running or yet to be forked; 0 after it has ended, or could not be forked."""
        return self._ended_within(0)

    def wait(self, timeout: float) -> int:
        """Wait until the server has ended.

        Raises:
            subprocess.TimeoutExpired: The server has not ended in time.
        """
        ended = self._ended_within(timeout)
        if ended is None:
            raise subprocess.TimeoutExpired("launch server", timeout)
        return ended

    def _ended_within(self, timeout: float) -> int | None:
        with self._lock:
            if not self._pid and not self._is_over:
                if not _is_readable(self._connection.fileno(), timeout):
                    return None  # the warm process still imports
                self._receive()
            if not self._is_over and _is_readable(self._ending, timeout):
                os.close(self._ending)
                self._is_over = True
            return 0 if self._is_over else None


def _is_readable(descriptor: int, timeout: float) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000 * timeout))


def fork_server(path: str, log: IO[bytes]) -> ForkedServer | None:
    """Ask the warm process for a launch server, without waiting; None if there is no suitable warm process.

    Args:
        path: Module search path of the launch server, in the form of ``$PYTHONPATH``.
        log: File that receives the server's output.
    """
    folder = os.environ.get(VARIABLE)
    if folder is None or not _CAN_WARM or not _is_private(folder):
        return None
    connection = socket.socket(socket.AF_UNIX)
    read, write = os.pipe()
    try:
        if json.loads(Path(folder, "card.json").read_text()) == _identity(path):
            with _short(folder) as address:
                connection.connect(address)
            hello = json.dumps(
                {"driver": os.getpid(), "cwd": str(Path.cwd()), "env": dict(os.environ)}
            ).encode()
            connection.sendall(b"%8d" % len(hello) + hello)
            socket.send_fds(connection, [b"."], [read, log.fileno()])
            return ForkedServer(connection, os.fdopen(write, "wb"))
    except (OSError, ValueError):  # the warm process has ended
        pass
    finally:
        os.close(read)
    os.close(write)
    connection.close()
    return None


def _is_private(folder: str) -> bool:
    """Return whether only this user can have put files into a folder."""
    try:
        found = Path(folder).stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o077


@contextlib.contextmanager
def _short(folder: str) -> Any:
    """Yield an address of the socket in `folder` that respects the limit of 107 characters even for a long path."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/socket"
    finally:
        os.close(opened)


def main() -> None:
    """Import what launch servers need, then fork one for each connection until standard input is closed."""
    from shardscope.runtime.launcher.server import import_everything

    folder = Path(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets servers that have ended
    try:
        with _short(str(folder)) as address, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            import_everything()
            while not _is_over(listener):
                connection, _ = listener.accept()
                with (
                    connection,
                    contextlib.suppress(OSError, ValueError),
                ):  # a kernel that has ended meanwhile
                    _fork(connection, listener)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_over(listener: socket.socket) -> bool:
    """Wait for a connection; return whether JupyterLab has ended instead."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    waiting.register(listener, select.POLLIN)
    return any(descriptor == 0 for descriptor, _ in waiting.poll())


def _fork(connection: socket.socket, listener: socket.socket) -> None:
    """Fork a launch server for a kernel, and send it the server's pid."""
    opened: list[int] = []
    try:
        connection.settimeout(10)
        hello = json.loads(_received(connection, int(_received(connection, 8))))
        _, (requests, log), _, _ = socket.recv_fds(connection, 1, 2)
        opened += [requests, log, driver := os.pidfd_open(hello["driver"])]
        pid = os.fork()
        if pid == 0:
            _serve(requests, log, driver, hello, [listener, connection])
        opened.append(os.pidfd_open(pid))
        socket.send_fds(connection, [str(pid).encode()], opened[-1:])
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _received(connection: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while missing := count - sum(map(len, parts)):
        part = connection.recv(missing)
        if not part:
            raise ValueError("the kernel has ended")
        parts.append(part)
    return b"".join(parts)


def _serve(
    requests: int, log: int, driver: int, hello: dict[str, Any], sockets: Iterable[socket.socket]
) -> NoReturn:
    """Serve the driver's requests in the forked child, like a launch server that the driver has started itself."""
    from shardscope.runtime.launcher.server import Server

    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor, standard in ((requests, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, standard)
        for own in sockets:
            own.close()
        os.close(requests)
        os.close(log)
        os.environ.clear()
        os.environ.update(hello["env"])
        with contextlib.suppress(OSError):
            os.chdir(hello["cwd"])
        Server(lambda: not _is_readable(driver, 0), later=[]).serve()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing above can handle it in a forked child
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
