"""A checkpoint that cannot be written is named on all ranks alike, and those before it stay."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import shardscope as ss
from conformance.alone import Never, trainer_in
from conformance.ranks import RankPool
from conformance.runs import small_job
from shardscope.errors import CheckpointError
from shardscope.training.checkpoint import writing
from shardscope.training.context import RankContext
from shardscope.training.disk import takes_no_more
from shardscope.training.trainer import Trainer

REFUSALS = {
    errno.ENOSPC: "No space left on device .*; free some space",
    errno.EFBIG: "File too large .*; raise the limit on file sizes",
    errno.EACCES: "Permission denied .*; make the folder writable",
    errno.EROFS: "Read-only file system .*; make the folder writable",
    errno.EIO: "Input/output error .*step-2$",
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize("where", ["rank-1.bin", "index.json"])
def test_what_one_rank_cannot_write_is_one_sentence_on_all(
    pool: RankPool, tmp_path: Path, number: int, where: str
) -> None:
    def body(context: RankContext) -> tuple[str, bool]:
        job = small_job(world_size=context.world_size, batch=24, steps=6, checkpoint=ss.Checkpoint(every=2))
        trainer = Trainer(job, context, tmp_path)
        for step in (1, 2):
            trainer.take_step(step)
        trainer._after_step(2, 0.0, None)
        before, writing._private = writing._private, refusing
        try:
            with pytest.raises(CheckpointError) as refused:
                trainer._after_step(4, 0.0, None)
        finally:
            writing._private = before
        trainer._after_step(4, 0.0, None)
        return str(refused.value), takes_no_more(refused.value)

    def refusing(path: str, flags: int) -> int:
        if path.endswith(where):
            raise OSError(number, os.strerror(number), path)
        return os.open(path, flags, 0o600)

    (told, is_full), *others = pool.run(body, tmp_path)
    assert set(others) == {(told, is_full)}
    assert is_full == (number in (errno.ENOSPC, errno.EFBIG))
    with pytest.raises(CheckpointError, match=rf"^{REFUSALS[number]}"):
        raise CheckpointError(told)
    assert "while writing checkpoint step-4 in" in told
    assert "the newest earlier checkpoint is step-2" in told
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-4"], (
        "no part of the refused one is left, and once there is room it is written"
    )


def test_the_run_itself_fails_with_that_sentence(runs_root: Path) -> None:
    """Here a file lies where the folder of checkpoints belongs."""

    def make_model() -> object:
        import torch

        for run in runs_root.iterdir():
            folder = run / "checkpoints"
            if folder.is_dir():
                folder.rmdir()
                folder.write_text("")
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    run = ss.launch(
        small_job(model=make_model, strategy="single", world_size=1, checkpoint=ss.Checkpoint(every=2))
    )
    with pytest.raises(ss.RunFailed, match="Not a directory while writing checkpoint step-2 in") as failed:
        run.wait(60)
    assert "Traceback" not in str(failed.value)


def test_a_checkpoint_that_is_half_deleted_does_not_carry_the_name_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **_: object) -> None:
        if path.exists():
            (path / "index.json").unlink()
            raise KeyboardInterrupt

    trainer = trainer_in(tmp_path, checkpoint=ss.Checkpoint(every=1, keep=1), steps=5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writing.shutil, "rmtree", killed)
        trainer.train(Never())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1.removed", "step-2"]
    trainer_in(tmp_path, checkpoint=ss.Checkpoint(every=3, keep=1)).train(Never())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]


def test_another_directory_in_the_place_of_the_run_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = trainer_in(run)
    run.rename(tmp_path / "elsewhere")
    run.mkdir()
    with pytest.raises(CheckpointError, match="No such file or directory while writing checkpoint step-2"):
        trainer.train(Never())
    assert list(run.iterdir()) == []


def test_a_folder_of_checkpoints_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    trainer.train(Never())
    assert (tmp_path / "checkpoints" / "step-4").is_dir()


def test_what_a_killed_save_of_any_step_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, checkpoint=ss.Checkpoint(every=2))
    left = tmp_path / "checkpoints" / "step-1.partial"
    left.mkdir(parents=True)
    (left / "rank-0.bin").write_bytes(b"half")
    trainer.train(Never())
    assert "step-2" in os.listdir(tmp_path / "checkpoints")
    assert not left.exists()
