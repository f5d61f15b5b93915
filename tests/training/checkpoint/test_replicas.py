"""Copies of the state in host memory: restored without the disk, also when the memory of a node is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardscope as ss
from conformance.ranks import RankPool
from conformance.runs import small_job
from shardscope.errors import CheckpointError, LaunchError
from shardscope.runlog.tail import read_events
from shardscope.runtime.agent.replicas import ReplicaMemory, remove_leftovers
from shardscope.training.checkpoint import memory
from shardscope.training.checkpoint.memory import HeldStep, newest_whole
from shardscope.training.context import RankContext
from shardscope.training.run_replicas import resume_newest
from shardscope.training.sharding import local
from shardscope.training.trainer import Trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are kept in /dev/shm")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[ReplicaMemory]:
    """Memory for copies, in a file system of the test's own."""
    made = ReplicaMemory.create(tmp_path)
    yield made
    made.remove()


def trainer_of(
    context: RankContext, folder: Path, kept: ReplicaMemory, per_node: int, **changes: Any
) -> Trainer:
    """A trainer whose ranks are on nodes of `per_node` ranks."""
    node = replace(context, local_world_size=per_node)
    fields: dict[str, Any] = {
        "world_size": context.world_size,
        "batch": 24,
        "steps": 6,
        "recovery": ss.Recovery(replica_every=1),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kept.env(context.rank // per_node).items():
            patch.setenv(name, value)
        return Trainer(small_job(**{**fields, **changes}), node, folder)


def state_of(trainer: Trainer) -> list[Tensor]:
    moments = [
        value
        for p in trainer.model.parameters()
        for _, value in sorted(trainer.optimizer.state.get(p, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    return [local(t.detach()).clone() for t in (*trainer.model.parameters(), *moments)]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [None, 0, 1])
@pytest.mark.parametrize("strategy", ["ring", "zero-3"])
def test_a_run_goes_on_from_memory_although_a_node_has_lost_its_own(
    pool: RankPool, tmp_path: Path, shared: ReplicaMemory, strategy: str, lost: int | None
) -> None:
    per_node = pool.world_size if lost is None else pool.world_size // 2

    def before(context: RankContext) -> list[Tensor]:
        trainer = trainer_of(context, tmp_path, shared, per_node, strategy=strategy)
        for step in (1, 2, 3):
            trainer.take_step(step)
            trainer._after_step(step, 0.0, None)
        return state_of(trainer)

    def after(context: RankContext) -> tuple[list[Tensor], int]:
        trainer = trainer_of(context, tmp_path, shared, per_node, strategy=strategy)
        resume_newest(trainer, None)
        found = state_of(trainer)
        trainer.take_step(4)
        trainer._after_step(4, 0.0, None)
        return found, trainer.first_step

    saved = pool.run(before, tmp_path)
    assert shared.newest_step() == 3
    num_nodes = pool.world_size // per_node
    for node in range(num_nodes):  # also those of the ranks of the node before
        files = {path.name for path in (memory.node_folder(shared.path, node) / "step-3").glob("rank-*")}
        nodes = {rank: rank // per_node for rank in range(pool.world_size)}
        held = {rank for rank, its in nodes.items() if its in (node, (node - 1) % num_nodes)}
        assert files == {f"rank-{rank}.bin" for rank in held}
    if lost is not None:
        shared.lose(lost)
        assert shared.newest_step() == 3, "its neighbour has a copy"
    restored = pool.run(after, tmp_path)
    for one, (other, first) in zip(saved, restored, strict=True):
        assert first == 4
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert shared.newest_step() == 4
    assert "replica" in (tmp_path / "rank-0.jsonl").read_text()


@pytest.mark.ranks(2)
def test_without_a_whole_copy_the_checkpoint_on_disk_is_loaded(
    pool: RankPool, tmp_path: Path, shared: ReplicaMemory
) -> None:
    def before(context: RankContext) -> None:
        every = ss.Checkpoint(every=2)
        trainer = trainer_of(context, tmp_path, shared, 1, checkpoint=every)
        for step in (1, 2, 3):
            trainer.take_step(step)
            trainer._after_step(step, 0.0, None)

    def after(context: RankContext) -> tuple[int, list[str]]:
        trainer = trainer_of(context, tmp_path, shared, 1)
        saved = resume_newest(trainer, tmp_path / "checkpoints")
        assert saved is not None
        return trainer.first_step, saved.notes

    pool.run(before, tmp_path)
    assert pool.run(after, tmp_path) == [(4, [])] * 2
    for node in (0, 1):
        damaged = memory.node_folder(shared.path, node) / "step-3/rank-1.bin"
        damaged.write_bytes(b"\0" * damaged.stat().st_size)
    for first, (note,) in pool.run(after, tmp_path):
        assert first == 3
        assert note.startswith("the newest copy in memory was not used: checkpoint step-3 is damaged")
    for node in (0, 1):
        shared.lose(node)
    assert pool.run(after, tmp_path) == [(3, [])] * 2, "lost"


@pytest.mark.ranks(2)
def test_memory_that_is_too_small_is_named_on_all_ranks(
    pool: RankPool, tmp_path: Path, shared: ReplicaMemory
) -> None:
    def body(context: RankContext) -> str:
        trainer = trainer_of(context, tmp_path, shared, 2)
        trainer.take_step(1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as refused:
            patch.setattr(memory, "free_bytes", lambda _: 1000 if context.rank == 0 else 10**12)
            trainer._after_step(1, 0.0, None)
        return str(refused.value)

    one, other = pool.run(body, tmp_path)
    assert one == other
    assert "recovery.replica_every keeps" in one
    assert "enlarge it (in a container: --shm-size), or set replica_every=None" in one


@pytest.mark.ranks(2)
def test_a_state_that_does_not_fit_in_memory_is_handed_over_on_the_disk(
    pool: RankPool, tmp_path: Path, shared: ReplicaMemory
) -> None:
    def body(context: RankContext) -> list[bool]:
        recovery = ss.Recovery(replica_every=1000)
        trainer = trainer_of(context, tmp_path, shared, 2, elastic="2:4", recovery=recovery)
        trainer.take_step(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "free_bytes", lambda _: 1000 if context.rank == 0 else 10**12)
            small = trainer.replicas.hand_over(1, is_resizing=lambda: True)
        assert context.rank or not list(memory.node_folder(shared.path, 0).iterdir())  # rank 0 deletes it
        return [small, trainer.replicas.hand_over(1, is_resizing=lambda: True)]

    assert pool.run(body, tmp_path) == [[False, True]] * 2
    assert shared.newest_step() == 1
    told = read_events(tmp_path, "not_handed_over")
    assert [event["step"] for event in told] == [1]
    assert "recovery.replica_every keeps" in told[0]["reason"]


@pytest.mark.ranks(2)
def test_what_earlier_ranks_left_in_memory_makes_room_for_the_second_copy(
    pool: RankPool, tmp_path: Path, shared: ReplicaMemory
) -> None:
    def body(context: RankContext, steps: range, free: int) -> None:
        trainer = trainer_of(context, tmp_path, shared, 2, optimizer="sgd")
        resume_newest(trainer, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "free_bytes", lambda _: free)
            for step in steps:
                trainer.take_step(step)
                trainer._after_step(step, 0.0, None)

    pool.run(lambda context: body(context, range(1, 2), 10**12), tmp_path)
    pool.run(lambda context: body(context, range(2, 4), 0), tmp_path)
    assert shared.newest_step() == 3


def test_a_step_is_whole_if_the_nodes_together_have_its_files() -> None:
    wanted = frozenset({"a", "b", "c"})

    def held(step: int, files: str, checksum: int = 7) -> HeldStep:
        return HeldStep(step, checksum, frozenset(files), wanted)

    assert newest_whole([[], []]) is None
    assert newest_whole([[held(1, "ab")], [held(1, "a")]]) is None
    assert newest_whole([[held(1, "ab"), held(2, "a")], [held(1, "c"), held(2, "b")]]).step == 1  # type: ignore[union-attr]
    assert newest_whole([[held(3, "ab")], [held(3, "c", checksum=8)]]) is None, "of different attempts"


def test_memory_of_a_killed_agent_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from shardscope.runtime.agent.replicas import ReplicaMemory; "
        f"print(ReplicaMemory.create(Path({str(tmp_path)!r})).path, flush=True); os.kill(os.getpid(), 9)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    left = Path(told.stdout.strip())
    assert left.is_dir()
    assert left.stat().st_mode & 0o077 == 0
    elsewhere = tmp_path / left.name.replace(left.name.split("-")[2], "1", 1)  # another container's agent
    elsewhere.mkdir()
    mine = ReplicaMemory.create(tmp_path)
    remove_leftovers(tmp_path)
    assert not left.exists()
    elsewhere.rmdir()
    assert mine.path.is_dir()
    mine.remove()
    assert os.listdir(tmp_path) == []


def test_without_an_agent_there_is_no_memory(tmp_path: Path) -> None:
    from conformance.alone import trainer_in

    with pytest.raises(LaunchError, match="replica_every=2 needs an agent .* ss.launch on Linux"):
        trainer_in(tmp_path, recovery=ss.Recovery(replica_every=2))
    with pytest.raises(LaunchError, match="needs .*nowhere, which this system does not have"):
        ReplicaMemory.create(tmp_path / "nowhere")
    shutil.rmtree(tmp_path)
