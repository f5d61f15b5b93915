"""Checkpoints that are written while training goes on: consistent, one at a time, complete at the end of the run."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardscope as ss
from conformance.alone import Never, trainer_in
from conformance.ranks import RankPool
from conformance.runs import small_job
from conformance.saved import contents, differing, slow_writers
from shardscope.errors import CheckpointError
from shardscope.training.checkpoint import writing
from shardscope.training.checkpoint.agreement import gather_items
from shardscope.training.checkpoint.background import Notices
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

IN_BACKGROUND = ss.Checkpoint(every=2, asynchronous=True)


def trainer_of(context: RankContext, folder: Path, **changes: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    fields = {
        "world_size": context.world_size,
        "batch": 24,
        "steps": 6,
        "checkpoint": IN_BACKGROUND,
        **changes,
    }
    return Trainer(small_job(**fields), context, folder)


def saved_events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rank-0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "checkpoint"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ring", "zero-1", "zero-3", "parameter-server", "gossip"])
def test_it_is_the_state_after_its_step_although_training_goes_on(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    def body(context: RankContext) -> int:
        at_once = trainer_of(
            context, tmp_path / "now", strategy=strategy, until=2, checkpoint=ss.Checkpoint(every=2)
        )
        at_once.train(Never())
        later = trainer_of(context, tmp_path / "later", strategy=strategy)
        with slow_writers(0.2):
            for step in (1, 2):
                later.take_step(step)
            later._after_step(2, 0.0, None)
            for step in (3, 4, 5):  # while the checkpoint is written
                later.take_step(step)
        later.checkpoints.wait()
        later.strategy.close()
        return len(os.listdir(tmp_path / "later/checkpoints"))

    assert pool.run(body, tmp_path) == [1, 1]
    now, then = (contents(tmp_path / name / "checkpoints/step-2") for name in ("now", "later"))
    assert differing(now, then) == set()


def test_training_waits_for_the_copy_only_and_the_next_save_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), writing.CheckpointPart.write

    def waiting(part: writing.CheckpointPart) -> writing.Report:
        may_write.wait(60)
        return write(part)

    monkeypatch.setattr(writing.CheckpointPart, "write", waiting)
    trainer = trainer_in(tmp_path, checkpoint=ss.Checkpoint(every=1, asynchronous=True))
    for step in (1, 2):
        trainer.take_step(step)
        if step == 2:
            assert trainer.checkpoints.holds(1)
            assert trainer.checkpoints.newest is None
            threading.Timer(0.5, may_write.set).start()
        trainer._after_step(step, 0.0, None)
    assert trainer.checkpoints.newest == tmp_path / "checkpoints/step-1"
    trainer.checkpoints.wait()
    first, second = saved_events(tmp_path)
    assert first["seconds"] > first["blocked_s"] + 0.4
    assert second["blocked_s"] > 0.4, "it has waited for the first"
    assert second["bytes"] > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["rank-1.bin", "index.json"])
def test_what_a_writer_cannot_write_ends_the_run_at_its_next_step_with_one_sentence_on_all_ranks(
    pool: RankPool, tmp_path: Path, where: str
) -> None:
    def refusing(path: str, flags: int) -> int:
        if path.endswith(where):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return os.open(path, flags, 0o600)

    def body(context: RankContext) -> str:
        trainer = trainer_of(context, tmp_path)
        trainer.take_step(1)
        trainer.take_step(2)
        trainer._after_step(2, 0.0, None)
        trainer.checkpoints.wait()
        before, writing._private = writing._private, refusing
        try:
            trainer._after_step(4, 0.0, None)
            with pytest.raises(CheckpointError) as refused:
                while trainer.checkpoints.holds(4):
                    trainer.checkpoints.check()
        finally:
            writing._private = before
        trainer._after_step(6, 0.0, None)
        trainer.checkpoints.wait()
        return str(refused.value)

    one, other = pool.run(body, tmp_path)
    assert one == other
    assert "No space left on device while writing checkpoint step-4 in" in one
    assert "the newest earlier checkpoint is step-2; free some space" in one
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-6"]


def test_all_are_complete_when_the_run_ends(tmp_path: Path) -> None:
    with slow_writers(0.3):
        trainer = trainer_in(tmp_path, checkpoint=ss.Checkpoint(every=3, at_end=True, asynchronous=True))
        assert trainer.train(Never()) == "completed"
    assert [event["step"] for event in saved_events(tmp_path)] == [3, 4]
    assert contents(tmp_path / "checkpoints/step-4")["extra.step"] == 4
    again = trainer_in(tmp_path / "again", steps=6)
    again.resume(tmp_path / "checkpoints")
    assert again.first_step == 5


def test_an_evaluation_that_fails_names_the_checkpoint_that_was_being_written(tmp_path: Path) -> None:
    import torch

    def make_model() -> torch.nn.Module:
        class Failing(torch.nn.Sequential):
            def forward(self, images: torch.Tensor) -> torch.Tensor:
                if not self.training:
                    raise ValueError("not in evaluation")
                return super().forward(images)

        return Failing(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    with slow_writers(0.3):
        trainer = trainer_in(
            tmp_path, model=make_model, checkpoint=ss.Checkpoint(at_end=True, asynchronous=True)
        )
        with pytest.raises(ss.ShardscopeError, match="the trained model is in .*step-4"):
            trainer.train(Never())
    assert (tmp_path / "checkpoints/step-4").is_dir()


@pytest.mark.ranks(2, 3)
def test_the_store_does_not_grow_with_the_number_of_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> list[int]:
        trainer = trainer_of(context, tmp_path)
        assert context.group is not None
        store, keys = context.group.get_group_store(), []
        for step in (2, 4, 6):
            trainer.take_step(step)
            trainer._after_step(step, 0.0, None)
            trainer.checkpoints.wait()
            gather_items(context, None)  # all ranks have read all
            keys.append(store.num_keys())
            gather_items(context, None)
        return keys

    for keys in pool.run(body, tmp_path):
        assert len(set(keys)) == 1


def test_a_writer_waits_no_longer_than_others_make_progress() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.9))
    notices = Notices(store)
    began = time.monotonic()
    writer = threading.Thread(target=lambda: [(time.sleep(0.2), notices.note_progress()) for _ in range(4)])
    writer.start()
    with pytest.raises(
        CheckpointError, match=r"anything for 0.9 s, while waiting for the part of rank 1; raise"
    ):
        notices.receive("part-1", what="the part of rank 1")
    assert time.monotonic() - began > 1.4  # 0.9 s after the last of the four
    writer.join()
