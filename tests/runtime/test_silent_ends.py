"""A rank that ends without an error, or that is stopped, does not keep its run waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

import shardscope as ss
from conformance.emulated import needs_namespaces
from conformance.runs import acting_module, all_gone, rank_pids, small_job
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.agent import left_behind
from shardscope.runtime.agent.left_behind import Left, LeftBehind, living
from shardscope.runtime.record.rundir import RunDir


def model_that(
    acts: Callable[[], None], victim: int, meanwhile: Callable[[], None] = lambda: None
) -> Callable[[], nn.Module]:
    """A function that makes a model which acts in the third forward pass of a rank, and something else in others."""

    return lambda: acting_module(acts if int(os.environ["RANK"]) == victim else meanwhile)


def leave() -> None:
    os._exit(0)


def sleep() -> None:
    time.sleep(60)


def go_on() -> None:
    pass


@pytest.mark.parametrize(
    ("strategy", "world_size", "victim", "meanwhile"),
    [
        ("single", 1, 0, go_on),
        ("ring", 2, 1, go_on),
        pytest.param("ring", 2, 1, sleep, marks=pytest.mark.weekly, id="while the other one sleeps"),
    ],
)
def test_a_rank_that_exits_as_if_all_were_well_is_named(
    strategy: str, world_size: int, victim: int, meanwhile: Callable[[], None]
) -> None:
    model = model_that(leave, victim, meanwhile)
    run = ss.launch(small_job(model=model, strategy=strategy, world_size=world_size, timeout_s=50))
    with pytest.raises(
        ss.RunFailed, match=rf"^rank {victim} of .* ended with exit code 0 after step 2, without"
    ):
        run.wait(40)
    assert all_gone([event["pid"] for event in run.events("process")])


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "world_size"), [(1, 1), (1, 2), (2, 2)])
def test_a_rank_that_exits_on_an_emulated_cluster_is_named(nodes: int, world_size: int) -> None:
    needs_namespaces()
    victim, strategy = world_size - 1, "single" if world_size == 1 else "ring"
    model = model_that(leave, victim, sleep)
    job = small_job(model=model, strategy=strategy, world_size=world_size, timeout_s=50)
    run = ss.launch(job, ss.Cluster.emulated(nodes=nodes, per_node=world_size // nodes))
    with pytest.raises(ss.RunFailed, match=rf"^rank {victim} of .* ended with exit code 0 after step 2"):
        run.wait(40)
    assert all_gone([event["pid"] for event in run.events("process")])


@pytest.mark.slow
def test_ranks_that_are_stopped_are_not_waited_for() -> None:
    """Elastic asks them to end, and waits for half a minute; a restart waited as long."""
    run = ss.launch(small_job(steps=1_000_000, world_size=3, batch=48, recovery=1))
    pids = rank_pids(run)
    os.kill(pids[2], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    asked = time.monotonic()
    while run.restarts == 0 and time.monotonic() < asked + 20:
        time.sleep(0.05)
    assert run.restarts == 1
    assert all_gone([*pids.values()], timeout=0.0)
    run.stop(grace_s=0.0)


@contextmanager
def two_ranks(folder: Path, first: str) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """Processes that stand for two ranks in mid-training, the second of which ends at once."""
    ranks = subprocess.Popen(first.split()), subprocess.Popen("true")
    try:
        for rank, process in enumerate(ranks):
            with EventWriter(folder / f"rank-{rank}.jsonl", rank) as events:
                events.emit("process", pid=process.pid, started=0.0)
        while living([ranks[1].pid]):
            time.sleep(0.01)
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_that_ranks_are_left_behind_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When those that are left behind have been killed, all have ended, but elastic reports that."""
    monkeypatch.setattr(left_behind, "_PATIENCE_S", 0.0)
    with two_ranks(tmp_path, "sleep 30") as (first, second):
        behind = LeftBehind(RunDir(tmp_path), earlier=set())
        looks = [behind.look({first.pid: None, second.pid: 0}) for _ in range(2)]
        first.kill()
        first.wait()
        looks += [behind.look({first.pid: code, second.pid: 0}) for code in (None, -9, 0)]
    assert looks == [Left.NONE, Left.SOME, Left.NONE, Left.NONE, Left.NONE]


def test_only_ranks_without_an_error_end_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_behind, "_PATIENCE_S", 0.0)
    with two_ranks(tmp_path, "true") as (first, second):
        while living([first.pid]):
            time.sleep(0.01)
        behind = LeftBehind(RunDir(tmp_path), earlier=set())
        looks = [behind.look({first.pid: code, second.pid: 0}) for code in (None, None, 1, 0)]
    assert looks == [Left.NONE, Left.NONE, Left.NONE, Left.ALL]
