"""Whatever dies, nothing hangs, nothing is left running, and the run directory still reads."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import shardscope as ss
from conformance.runs import (
    agent_pid,
    all_gone,
    endless_job,
    family,
    freeze,
    open_files,
    rank_pids,
    semaphores,
    small_job,
    wait_for,
)
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.launcher.driver_server import driver as launcher
from shardscope.runtime.record.rundir import RunDir

pytestmark = pytest.mark.slow


def test_a_killed_agent_takes_its_ranks_along() -> None:
    run = ss.launch(endless_job(world_size=3, batch=48))
    rank_pids(run)
    processes = family(run)
    os.kill(agent_pid(run), signal.SIGKILL)
    with pytest.raises(ss.RunFailed, match="agent of run .* was killed"):
        run.wait(60)
    assert run.cause == "killed"
    assert all_gone(processes)
    assert len(ss.Run.attach(run.path).metrics()) >= 1


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (["Connection closed by peer [127.0.0.1]:4242"], "the agent of run .* was killed before the run ended"),
        (["Connection closed by peer [127.0.0.1]:4242", "no such layer"], "rank 1 failed: RuntimeError: no such layer"),
    ],
)  # fmt: skip
def test_that_others_have_gone_is_no_cause_beside_a_killed_agent(
    said: list[str], told: str, tmp_path: Path
) -> None:
    run = RunDir.create(small_job(), tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    run.write_status("running", pid=gone.pid, process_started=0.0)
    for rank, message in enumerate(said):
        with EventWriter(run.rank_file(rank), rank) as events:
            events.emit("error", step=3, strategy="ring", type="RuntimeError", message=message, traceback="")
    attached = ss.Run.attach(run.path)
    assert attached.state == "failed"
    assert re.search(told, str(attached.error))
    assert attached.cause == (None if "no such layer" in said else "killed")


def test_a_killed_server_ends_its_runs_and_the_next_launch_starts_another() -> None:
    run = ss.launch(endless_job())
    rank_pids(run)
    processes = family(run)
    server = psutil.Process(agent_pid(run)).parent()
    assert server is not None
    server.kill()
    with pytest.raises(
        ss.RunFailed, match=f"the launch server .*process {server.pid}.* was killed"
    ) as failed:
        run.wait(60)
    assert "\n" not in str(failed.value)
    assert (run.state, run.cause) == ("failed", "killed")
    assert all_gone([server.pid, *processes])
    assert ss.launch(small_job()).wait(60).state == "completed"


def test_a_server_killed_while_it_is_asked_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    server = launcher.server()
    server.kill()
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(server, "poll", lambda: None)  # as if it had been alive when the launch looked
    assert ss.launch(small_job()).wait(60).state == "completed"


def test_a_killed_forkserver_is_named() -> None:
    run = ss.launch(endless_job(world_size=3, batch=48))
    pids = rank_pids(run)
    processes = family(run)
    forkserver = psutil.Process(pids[0]).parent()
    assert forkserver is not None
    assert forkserver.pid not in (agent_pid(run), *pids.values())
    forkserver.kill()
    with pytest.raises(
        ss.RunFailed, match=f"the forkserver .*process {forkserver.pid}.* was killed by SIGKILL"
    ) as failed:
        run.wait(60)
    assert (failed.value.rank, run.cause) == (None, "killed")
    assert "\n" not in str(failed.value)
    assert all_gone(processes)


DRIVER = """
    import signal, sys, time
    import shardscope as ss
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=1_000_000)
    run = ss.launch(job, detach={detach})
    while len({{event["rank"] for event in run.events("step")}}) < 2:  # a step counts once all ranks have taken it
        time.sleep(0.02)
    path = run.path
    while True:
        try:
            if path:
                path = print(path, flush=True)  # inside the try: the interrupt may come as soon as it is read
            time.sleep(1000)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


def start_driver(*, detach: bool = False) -> tuple[subprocess.Popen[str], ss.Run]:
    """A process of its own that launches an endless run, as a notebook's kernel would."""
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER.format(detach=detach))], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert driver.stdout is not None
    return driver, ss.Run.attach(driver.stdout.readline().strip())


def test_a_killed_kernel_ends_its_runs() -> None:
    driver, run = start_driver()
    processes = family(run)
    driver.kill()
    driver.wait()
    assert run.wait(60).state == "stopped"
    assert (run.reason, run.cause) == ("the program that launched it ended", "driver-ended")
    assert all_gone(processes)
    assert len(run.metrics()) >= 1


def test_an_interrupted_kernel_leaves_its_runs_alone() -> None:
    driver, run = start_driver()
    os.killpg(driver.pid, signal.SIGINT)  # as Jupyter interrupts a cell: the whole process group
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == "interrupted"
    seen = len(run.events("step"))
    wait_for(lambda: len(run.events("step")) > seen + 10, run)
    driver.kill()
    driver.wait()
    assert run.wait(60).state == "stopped"


def test_an_interrupt_of_the_process_group_reaches_no_rank() -> None:
    run = ss.launch(endless_job())
    pids = rank_pids(run)
    for pid in pids.values():
        os.kill(pid, signal.SIGINT)
    agent = psutil.Process(agent_pid(run))
    for process in (agent, agent.parent()):
        assert process is not None
        process.send_signal(signal.SIGINT)
    seen = len(run.events("step"))
    wait_for(lambda: len(run.events("step")) > seen + 10, run)
    assert run.stop().state == "stopped"


def test_a_terminated_agent_stops_its_run() -> None:
    run = ss.launch(endless_job())
    rank_pids(run)
    processes = family(run)
    os.kill(agent_pid(run), signal.SIGTERM)
    assert run.wait(60).state == "stopped"
    assert (run.reason, run.cause) == ("its agent received SIGTERM", "terminated")
    assert all_gone(processes)


def test_a_detached_run_outlives_its_kernel_and_is_found_again() -> None:
    driver, run = start_driver(detach=True)
    driver.kill()
    driver.wait()
    seen = len(run.events("step"))
    wait_for(lambda: len(run.events("step")) > seen + 10, run)
    processes = family(run)
    assert ss.Run.attach(run.id).stop().state == "stopped"
    assert all_gone(processes)


def test_a_torn_last_line_is_skipped() -> None:
    run = ss.launch(small_job()).wait(60)
    whole = len(run.events())
    log = run.path / "rank-0.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    assert len(ss.Run.attach(run.path).events()) == whole - 1


@pytest.mark.weekly
def test_start_and_stop_leak_neither_process_nor_file() -> None:
    ss.launch(small_job()).wait(60)
    before = None
    for cycle in range(50):
        run = ss.launch(endless_job())
        if cycle % 2:
            wait_for(lambda run=run: run.events("step"), run)
        run.stop(grace_s=0.0 if cycle % 3 == 0 else 5.0)
        assert run.state == "stopped", run.error
        if cycle == 9:
            before = _resources()
    assert before is not None
    deadline = time.monotonic() + 30
    while (grown := _grown_since(before)) and time.monotonic() < deadline:
        pass  # each look takes its time
    assert not grown


def _grown_since(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What there is more of than before. Less is no leak: an earlier test's garbage may have been collected since."""
    return {name: (before[name], count) for name, count in _resources().items() if count > before[name]}


def _resources() -> dict[str, int]:
    gc.collect()
    me = psutil.Process()
    server = next(
        child for child in me.children() if "shardscope.runtime.launcher.server" in " ".join(child.cmdline())
    )
    wait_for(lambda: len(server.children()) <= 1)  # the standard library's resource tracker stays
    time.sleep(0.6)  # the server looks after its agents a few times a second
    return {"ours": open_files(), "the server's": open_files(server.pid), "children": len(me.children())}


@pytest.mark.skipif(sys.platform != "linux", reason="semaphores are files on Linux only")
def test_stopping_a_frozen_agent_leaves_no_semaphore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardscope.runtime.record.run._KILL_AFTER_S", 0.5)
    run = ss.launch(endless_job())
    rank_pids(run)
    processes, held = family(run), semaphores(agent_pid(run))
    assert held
    freeze(processes)
    run.stop(grace_s=0.0)
    assert all_gone(processes)
    assert not [path for path in held if path.exists()]


def test_ranks_listen_on_loopback_only() -> None:
    run = ss.launch(endless_job())
    rank_pids(run)
    addresses = {
        connection.laddr.ip
        for pid in family(run)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    run.stop()
    assert addresses == {"127.0.0.1"}


def test_the_run_directory_holds_nothing_but_files(tmp_path: Path) -> None:
    run = ss.launch(small_job(name="a name/with: odd ../characters")).wait(60)
    assert run.path.parent == Path(os.environ["SHARDSCOPE_RUNS"])
    assert not [path for path in run.path.rglob("*") if path.is_socket()]


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no unix sockets here")
def test_a_run_directory_with_a_long_path_works(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 20) / ("longer" * 20)
    assert ss.launch(small_job(), root=deep).wait(60).state == "completed"
