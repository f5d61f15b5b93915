"""The server of the browser's tests ends with their runner, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

RUNNER = """
import sys, time
from pathlib import Path
from browser.lab_server import jupyter_server
with jupyter_server(Path(sys.argv[1])) as server:
    print(server.process.pid, server.base, server.token, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_server_and_its_kernels_end_with_a_runner_that_is_killed(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", RUNNER, str(tmp_path / "jupyter")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as runner:
        assert runner.stdout is not None
        pid, base, token = runner.stdout.readline().split()
        headers = {"Authorization": f"token {token}"}
        asked = urllib.request.Request(f"{base}/api/kernels", data=b"{}", headers=headers, method="POST")
        urllib.request.urlopen(asked, timeout=30).read()
        server = psutil.Process(int(pid))
        started = [server, *server.children(recursive=True)]
        assert any("ipykernel" in " ".join(process.cmdline()) for process in started)
        runner.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left
