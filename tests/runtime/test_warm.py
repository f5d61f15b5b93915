"""The warm process of a JupyterLab: launch servers that are forks of it, and who ends when."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from conformance.runs import wait_for
from shardscope.runtime.launcher import warm
from shardscope.runtime.launcher.driver_server import LaunchServer, search_path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the warm process needs Linux")
KERNEL = """
import sys, time
import shardscope as ss
run = ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=16, steps=int(sys.argv[1])))
print(run.path, flush=True)
run.wait(timeout=60)
"""


@pytest.fixture(scope="module")
def process():
    started = warm.start(search_path())
    folder = Path(os.environ[warm.VARIABLE])
    wait_for(Path(folder, "socket").exists)
    yield started
    started.stdin.close()
    started.wait(60)
    assert not folder.exists()
    del os.environ[warm.VARIABLE]


def kernel(steps: int, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def forks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def test_a_kernel_trains_on_a_fork_which_ends_with_it(process, tmp_path):
    first = kernel(3, SHARDSCOPE_RUNS=str(tmp_path / "of-the-kernel"))
    output, _ = first.communicate(timeout=90)
    assert first.returncode == 0
    assert Path(output.strip()).parent == tmp_path / "of-the-kernel"
    assert '"completed"' in Path(output.strip(), "status.json").read_text()
    wait_for(lambda: not forks_of(process))


def test_killing_a_kernel_ends_its_run_and_its_fork(process):
    victim = kernel(100_000)
    path = Path(victim.stdout.readline().strip())
    wait_for(lambda: '"running"' in Path(path, "status.json").read_text())
    (server,) = forks_of(process)
    ranks = server.children(recursive=True)
    victim.kill()
    victim.communicate(timeout=10)
    wait_for(lambda: not any(map(psutil.Process.is_running, [server, *ranks])))


@pytest.mark.slow
def test_settings_of_native_libraries_that_differ_start_another_process(process, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    server = LaunchServer()
    assert isinstance(server.server(), subprocess.Popen)
    server.close()


def test_a_warm_process_that_was_killed_is_replaced(monkeypatch):
    monkeypatch.delenv(warm.VARIABLE, raising=False)
    process = warm.start(search_path())
    folder = Path(os.environ[warm.VARIABLE])
    wait_for(Path(folder, "socket").exists)
    server = LaunchServer()
    asked = server.server()
    process.kill()
    process.communicate()
    wait_for(lambda: asked.poll() is not None)
    with pytest.raises(BrokenPipeError):
        asked.pid  # noqa: B018
    assert isinstance(server.server(), subprocess.Popen)
    server.close()
    shutil.rmtree(folder)


def test_many_threads_may_ask_at_once_whether_a_server_lives(process):
    server = LaunchServer()
    handle = server.server()
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: (handle.poll(), handle.pid), range(40))]
    assert set(found) == {(None, handle.pid)}
    server.close()
    assert handle.poll() == 0


def test_a_folder_of_another_user_or_open_to_others_is_not_trusted(process, monkeypatch, tmp_path):
    shutil.copy(Path(os.environ[warm.VARIABLE], "card.json"), tmp_path)
    tmp_path.chmod(0o777)
    monkeypatch.setenv(warm.VARIABLE, str(tmp_path))
    with open(os.devnull, "wb") as log:
        assert warm.fork_server(search_path(), log) is None


@pytest.mark.slow
def test_a_driver_whose_warm_process_cannot_fork_starts_its_own_server(process, monkeypatch):
    server = LaunchServer()
    monkeypatch.setattr(os, "getpid", lambda: 2**30)  # there is no such driver
    handle = server.server()
    with pytest.raises(BrokenPipeError):
        handle.pid  # noqa: B018
    assert isinstance(server.server(), subprocess.Popen)
    server.close()
