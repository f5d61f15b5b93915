"""A JupyterLab on loopback that shares no setting, kernel, file or run with the developer's own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from conformance.ports import free_port
from shardscope.commands.lab import EXTENSIONS
from shardscope.runtime.record.processes import die_with_parent

SETTINGS = {"@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
FOLDERS = {
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    "IPYTHONDIR": "ipython",
    "SHARDSCOPE_RUNS": "runs",
}


@dataclass(frozen=True)
class Server:
    base: str
    token: str
    root: Path
    runs: Path
    process: subprocess.Popen[bytes]

    def working_on_runs(self) -> dict[int, str]:
        """Kernels, agents and ranks of this session that are still there, wherever their parents are, by pid."""
        return {
            pid: text for pid in psutil.pids() if pid != self.process.pid and (text := self._belongs(pid))
        }

    def _belongs(self, pid: int) -> str:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            is_warm = process.ppid() == self.process.pid and any(
                "launcher.warm" in part for part in process.cmdline()
            )
            if process.environ().get("SHARDSCOPE_RUNS") == str(self.runs) and not is_warm:
                return " ".join(process.cmdline())
        return ""


@contextlib.contextmanager
def jupyter_server(folder: Path) -> Iterator[Server]:
    root, log = folder / "root", folder / "server.log"
    root.mkdir(parents=True)
    _write_settings(folder / "settings")
    port, token = free_port(), secrets.token_hex(16)
    env = os.environ | {name: str(folder / sub) for name, sub in FOLDERS.items()} | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            _command(port, token, root), stdout=out, stderr=subprocess.STDOUT, env=env,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - a runner that is killed leaves no server behind
        )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", token, root, folder / "runs", process)
    try:
        _wait_until_up(server, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def _write_settings(folder: Path) -> None:
    for plugin, value in SETTINGS.items():
        target = folder / f"{plugin}.jupyterlab-settings"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(value))


def _command(port: int, token: str, root: Path) -> list[str]:
    return [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True",
        "--LabApp.extension_manager=readonly",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        *(f"--ServerApp.jpserver_extensions={extension}=True" for extension in EXTENSIONS),
    ]  # fmt: skip


def _wait_until_up(server: Server, log: Path, timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{server.base}/api/status?token={server.token}", timeout=2).read()
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")
