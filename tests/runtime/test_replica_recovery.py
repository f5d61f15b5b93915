"""Runs that restart from copies of their state in memory, without a checkpoint on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shardscope as ss
from conformance.emulated import needs_namespaces
from conformance.runs import losses, small_job
from shardscope.runtime.agent import replicas

pytestmark = pytest.mark.slow
WITHIN_S = 120
STEPS = 10


def job(**changes: object) -> ss.Job:
    return small_job(**{"steps": STEPS, "recovery": ss.Recovery(2, replica_every=1), **changes})


def left_in_memory() -> list[Path]:
    return list(Path("/dev/shm").glob("shardscope-replicas-*"))


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "zero-3", "pipeline", "parameter-server"])
def test_a_killed_rank_costs_the_step_in_flight_and_no_more(strategy: str) -> None:
    plain = job(strategy=strategy, recovery=None)
    run = ss.launch(job(strategy=strategy), faults=ss.Faults().kill(1, step=7)).wait(WITHIN_S)
    assert run.state_text == "completed after 1 restart"
    assert losses(run) == losses(ss.launch(plain).wait(WITHIN_S))
    (event,) = run.events("restart")
    assert event["source"] == "replica"
    assert event["step"] in (5, 6)
    assert run.summary().lost_steps <= 1
    assert [each["source"] for each in run.events("resume", rank=0)] == ["replica"]
    assert not (run.path / "checkpoints").exists() or not list((run.path / "checkpoints").iterdir())
    assert left_in_memory() == []


@pytest.mark.sampled
@pytest.mark.parametrize("victim", ["node=1", "node=0"])
def test_the_state_of_a_lost_node_comes_from_its_neighbour(victim: str) -> None:
    needs_namespaces()
    pair = ss.Cluster.emulated(nodes=2, bandwidth="1 Gbit/s")
    run = ss.launch(job(), pair, faults=f"kill {victim} step=7").wait(WITHIN_S)
    assert run.state_text == "completed after 1 restart"
    assert losses(run) == losses(ss.launch(job(recovery=None)).wait(WITHIN_S))
    (event,) = run.events("restart")
    assert event["source"] == "replica"
    assert run.summary().lost_steps <= 1
    assert left_in_memory() == []


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", [ss.Zero3(), ss.Zero1(shards=(2, 1, 2, 1))], ids=lambda each: each.label)
def test_a_lost_node_of_several_ranks_comes_from_its_neighbour(strategy: ss.Strategy) -> None:
    """Each rank has the only shard of its part, so copies on the same node would all be lost with it."""
    needs_namespaces()
    pair = ss.Cluster.emulated(nodes=2, per_node=2, bandwidth="1 Gbit/s")
    ours = job(strategy=strategy, world_size=4)
    run = ss.launch(ours, pair, faults="kill node=1 step=7").wait(WITHIN_S)
    assert run.state_text == "completed after 1 restart"
    assert losses(run) == losses(ss.launch(ours.replace(recovery=None)).wait(WITHIN_S))
    (event,) = run.events("restart")
    assert event["source"] == "replica"
    assert run.summary().lost_steps <= 1
    assert left_in_memory() == []


def test_a_system_without_memory_for_copies_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def create() -> replicas.ReplicaMemory:
        return made(tmp_path / "nowhere")

    made = replicas.ReplicaMemory.create
    monkeypatch.setattr(replicas.ReplicaMemory, "create", staticmethod(create))
    from shardscope.runtime.record.rundir import RunDir

    run = RunDir.create(job(), tmp_path)
    memory, why_not = replicas.memory_for(run)
    assert memory is None
    assert "replica_every needs" in why_not
    assert "set replica_every=None to recover from the disk" in why_not


def test_any_agent_removes_the_copies_of_a_killed_one(tmp_path: Path) -> None:
    code = (
        "import os; from shardscope.runtime.agent.replicas import ReplicaMemory; "
        "print(ReplicaMemory.create().path, flush=True); os.kill(os.getpid(), 9)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    left = Path(told.stdout.strip())
    assert left.is_dir()
    ss.launch(small_job(steps=1), root=tmp_path).wait(WITHIN_S)
    assert not left.exists()
