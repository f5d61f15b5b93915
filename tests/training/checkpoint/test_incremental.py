"""Checkpoints that hold only what has changed: complete in themselves, whatever becomes of the earlier ones."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.alone import Never, trainer_in
from conformance.ranks import RankPool
from conformance.runs import small_job
from conformance.saved import contents, differing
from shardscope.errors import CheckpointError
from shardscope.training.checkpoint import writing
from shardscope.training.checkpoint.pieces import HeldPiece
from shardscope.training.checkpoint.unchanged import Unchanged
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

SHARED = "rank-0-step-1.bin"


def half_frozen() -> nn.Module:
    """Two layers of equal size, of which the first is not trained."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight.requires_grad_(False)
    return model


def bytes_of(folder: Path) -> list[int]:
    lines = (folder / "rank-0.jsonl").read_text().splitlines()
    return [event["bytes"] for event in map(json.loads, lines) if event["event"] == "checkpoint"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run of four steps that has saved after each of them, and kept two."""
    checkpoint = ss.Checkpoint(every=1, keep=2, incremental=True)
    trainer_in(tmp_path, model=half_frozen, optimizer="sgd", checkpoint=checkpoint).train(Never())
    return tmp_path / "checkpoints"


def test_frozen_parameters_are_written_once(saved: Path) -> None:
    first, second, *others = bytes_of(saved.parent)
    assert first > 2 * 64 * 64 * 4
    assert second == first - 64 * 64 * 4, "without the frozen layer"
    assert others == [64 * 64 * 4] * 2, "the trained layer alone: random states have not changed either"
    assert sorted(path.name for path in saved.iterdir()) == ["step-3", "step-4"]
    files = [(saved / step / SHARED).stat() for step in ("step-3", "step-4")]
    assert files[0].st_ino == files[1].st_ino, (
        "one file on disk, which outlives the checkpoint that it was written for"
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "zero-3"])
def test_it_holds_what_a_whole_one_holds_and_a_run_goes_on_from_it(
    pool: RankPool, tmp_path: Path, strategy: str, asynchronous: bool
) -> None:
    def body(context: RankContext) -> int:
        for name, changes in {
            "whole": {}, "parts": {"incremental": True, "asynchronous": asynchronous}
        }.items():  # fmt: skip
            (tmp_path / name).mkdir(exist_ok=True)
            job = small_job(
                model=half_frozen, strategy=strategy, world_size=context.world_size, batch=24, steps=5,
                checkpoint=ss.Checkpoint(every=1, keep=1, **changes),
            )  # fmt: skip
            Trainer(job, context, tmp_path / name).train(Never())
        again = Trainer(job.replace(steps=7), context, tmp_path)
        again.resume(tmp_path / "parts/checkpoints")
        return again.first_step

    assert pool.run(body, tmp_path) == [6, 6]
    whole, parts = (contents(tmp_path / name / "checkpoints/step-5") for name in ("whole", "parts"))
    assert differing(whole, parts) == set()


def test_what_is_frozen_in_mid_run_is_no_longer_written_nor_is_its_optimizer_state(tmp_path: Path) -> None:
    checkpoint = ss.Checkpoint(every=1, keep=1, incremental=True)
    trainer = trainer_in(
        tmp_path, model=lambda: half_frozen().requires_grad_(True), steps=8, checkpoint=checkpoint
    )
    for step in range(1, 9):
        if step == 4:
            trainer.model[1].weight.requires_grad_(False)
        trainer.take_step(step)
        trainer._after_step(step, 0.0, None)
    sizes = bytes_of(tmp_path)
    whole = 2 * 3 * 64 * 64 * 4  # weights and two moments of two layers
    assert whole <= sizes[2] < 1.02 * whole
    assert sizes[-1] <= 1.01 * whole / 2
    assert sizes[-1] == sizes[-2] == sizes[-3]


@pytest.mark.parametrize("missing", [False, True])
def test_damage_to_a_shared_file_is_named(saved: Path, missing: bool) -> None:
    shared = saved / "step-4" / SHARED
    if missing:
        shared.unlink()
    else:
        with shared.open("r+b") as file:
            file.seek(100)
            file.write(b"\xff\x00\xff")
    again = trainer_in(saved.parent / "again", model=half_frozen, optimizer="sgd", steps=6)
    if missing:
        again.resume(saved)
        assert again.first_step == 4, "the link of the checkpoint before is a name of its own"
        notes = (saved.parent / "again/rank-0.jsonl").read_text()
        assert f"step-4 is damaged ({SHARED} is missing)" in notes
        return
    with pytest.raises(CheckpointError, match=rf"model.1.weight in {SHARED} were modified") as refused:
        again.resume(saved)
    assert "step-3 is damaged" in str(refused.value)


def test_a_checkpoint_that_somebody_has_deleted_is_not_needed_by_the_next(tmp_path: Path) -> None:
    checkpoint = ss.Checkpoint(every=1, keep=1, incremental=True)
    trainer = trainer_in(tmp_path, model=half_frozen, checkpoint=checkpoint)
    for step in (1, 2, 3):
        trainer.take_step(step)
        trainer._after_step(step, 0.0, None)
        if step == 2:
            writing.shutil.rmtree(tmp_path / "checkpoints/step-2")
    assert contents(tmp_path / "checkpoints/step-3")["extra.step"] == 3


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(writing.os, "link", refuse)
    trainer = trainer_in(tmp_path, checkpoint=ss.Checkpoint(every=1, incremental=True))
    trainer.take_step(1)
    with pytest.raises(
        CheckpointError, match="No hard links for .* another file system, or incremental=False"
    ):
        trainer._after_step(1, 0.0, None)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_files_that_are_mostly_out_of_date_are_not_kept(tmp_path: Path) -> None:
    """Of three settled pieces, two change after all: the third is written again, so that the disk gets its space back.

    Files are named here by the step at which they are written, as on disk.
    """
    pieces = {(key, (0,)): HeldPiece(torch.full((100,), 1.0), (0,), (100,)) for key in "abc"}
    unchanged = Unchanged(frozen="abc")
    written: list[list[str]] = []
    for step in range(4):
        if step == 1:
            pieces["a", (0,)].tensor.add_(1)
        if step == 2:
            pieces["b", (0,)].tensor.add_(1)
        changed, settled, linked = unchanged.divide(pieces)
        written.append([key for key, _ in (*changed, *settled)])
        entries = {place: {"file": f"step-{step}"} for place in settled}
        entries |= linked
        sizes = {f"step-{step}": 400 * len(settled)}
        unchanged.note(entries, {**unchanged._sizes, **sizes})
        unchanged.commit(tmp_path)
    assert written == [["a", "b", "c"], ["a"], ["b", "a", "c"], ["b"]]
