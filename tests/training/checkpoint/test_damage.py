"""Whatever becomes of a checkpoint on disk: it is named in one sentence, an older one is taken, nothing is executed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardscope as ss
from conformance.alone import Never, trainer_in
from conformance.ranks import RankPool
from conformance.runs import small_job
from shardscope.errors import CheckpointError
from shardscope.training.checkpoint import index, loading
from shardscope.training.checkpoint.index import Damaged, read_index, verify
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

BIN, INDEX = "rank-0.bin", "index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with whole checkpoints after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    assert trainer_in(folder).train(Never()) == "completed"
    return folder / "checkpoints"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def flipped(path: Path, at: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """An index that somebody has changed, checksum and all."""
    content = json.loads((path / INDEX).read_text())["content"]
    change(content)
    whole = {"checksum": index._checksum(content), "content": content}
    (path / INDEX).write_text(json.dumps(whole))


def first_piece(content: dict[str, Any]) -> dict[str, Any]:
    return next(stored["pieces"][0] for stored in content["tensors"].values() if stored["pieces"])


def first_tensor(content: dict[str, Any]) -> dict[str, Any]:
    return next(stored for stored in content["tensors"].values() if len(stored["shape"]) > 1)


def linked(path: Path) -> None:
    (path / BIN).rename(path.parent / "elsewhere")
    (path / BIN).symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    (path / BIN).unlink()
    os.mkfifo(path / BIN)


def folder_for_file(path: Path) -> None:
    (path / INDEX).unlink()
    (path / INDEX).mkdir()


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def file_for_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "an empty folder": emptied,
    "a file for the folder": file_for_folder,
    "no index": lambda path: (path / INDEX).unlink(),
    "an empty index": lambda path: (path / INDEX).write_text(""),
    "a cut index": lambda path: os.truncate(path / INDEX, 1000),
    "no JSON": lambda path: (path / INDEX).write_text("checkpoint"),
    "other JSON": lambda path: (path / INDEX).write_text("[1, 2]"),
    "deep JSON": lambda path: (path / INDEX).write_text("[" * 200_000),
    "a long number": lambda path: (path / INDEX).write_text("1" * 5000),
    "no text": lambda path: (path / INDEX).write_bytes(b"\xff\xfe\x00"),
    "a flipped bit in the index": lambda path: flipped(path / INDEX, 2000),
    "a folder for the index": folder_for_file,
    "no tensors": lambda path: (path / BIN).unlink(),
    "empty tensors": lambda path: os.truncate(path / BIN, 0),
    "cut tensors": lambda path: os.truncate(path / BIN, 999),
    "longer tensors": lambda path: os.truncate(path / BIN, 10**7),
    "a flipped bit in the tensors": lambda path: flipped(path / BIN, 12_345),
    "a link for a file": linked,
    "a pipe for a file": pipe,
    "a path that leaves": lambda path: rewritten(path, lambda c: first_piece(c).update(file="../step-2/rank-0.bin")),
    "an absolute path": lambda path: rewritten(path, lambda c: c["files"].update({"/etc/passwd": 1})),
    "a huge offset": lambda path: rewritten(path, lambda c: first_piece(c).update(at=2**61)),
    "a number too large": lambda path: rewritten(path, lambda c: first_piece(c).update(at=2**80)),
    "a negative offset": lambda path: rewritten(path, lambda c: first_piece(c).update(at=-8)),
    "a huge tensor": lambda path: rewritten(path, lambda c: first_tensor(c).update(shape=[2**40, 2**20])),
    "a huge piece": lambda path: rewritten(
        path, lambda c: (first_tensor(c).update(shape=[2**40]), first_tensor(c)["pieces"][0].update(shape=[2**40]))
    ),
    "a tensor without pieces": lambda path: rewritten(path, lambda c: first_tensor(c).update(pieces=[])),
    "a number format that is none": lambda path: rewritten(path, lambda c: first_tensor(c).update(dtype="load")),
    "text for a number": lambda path: rewritten(path, lambda c: first_piece(c).update(at="0")),
    "a file of no bytes": lambda path: rewritten(path, lambda c: c.update(files={})),
    "another kind": lambda path: rewritten(path, lambda c: c.update(kind="other")),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(copy: Path, damage: str) -> None:
    DAMAGE[damage](copy / "step-4")
    again = trainer_in(copy.parent / "again", steps=6)
    with pytest.raises(
        CheckpointError, match=r"checkpoint step-4 is damaged \(.*intact checkpoint is .*step-2$"
    ) as refused:
        again.resume(copy / "step-4")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value).replace(str(copy.parent), "")) < 400
    again.resume(copy)
    (told,) = [
        e for e in map(json.loads, (copy.parent / "again/rank-0.jsonl").open()) if e["event"] == "resume"
    ]
    assert told["step"] == 2
    assert "checkpoint step-4 is damaged" in told["notes"][0]
    assert "continues from the earlier step-2" in told["notes"][0]


def test_where_all_are_damaged_each_is_named(copy: Path) -> None:
    for path in copy.iterdir():
        flipped(path / BIN, 77)
    with pytest.raises(CheckpointError, match=r"can be loaded: .*step-4 is damaged .*step-2 is damaged"):
        trainer_in(copy.parent / "again").resume(copy)


@settings(max_examples=40)
@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    path = Path(shutil.copytree(saved / "step-4", tmp_path_factory.mktemp("bits") / "step-4"))
    name = data.draw(st.sampled_from([BIN, INDEX]))
    size = (path / name).stat().st_size
    flipped(path / name, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
    with pytest.raises(Damaged):
        verify(path, read_index(path), [BIN])


def test_all_ranks_go_on_from_the_same_checkpoint_where_only_one_sees_the_damage(
    pool: RankPool, tmp_path: Path
) -> None:
    def body(context: RankContext) -> int:
        job = small_job(world_size=context.world_size, batch=24, steps=4, checkpoint=ss.Checkpoint(every=2))
        Trainer(job, context, tmp_path).train(Never())
        if context.rank == 0:
            flipped(tmp_path / "checkpoints/step-4" / f"rank-{context.world_size - 1}.bin", 100)
        torch.distributed.barrier()
        (tmp_path / "again").mkdir(exist_ok=True)
        again = Trainer(job, context, tmp_path / "again")
        again.resume(tmp_path / "checkpoints")
        return again.first_step

    assert pool.run(body, tmp_path) == [3] * pool.world_size


@pytest.mark.ranks(2)
@pytest.mark.parametrize("blind", [0, 1])
@pytest.mark.parametrize("named", [True, False])
def test_all_ranks_go_on_from_what_rank_0_lists(
    pool: RankPool, tmp_path: Path, blind: int, named: bool
) -> None:
    def body(context: RankContext) -> int:
        job = small_job(world_size=2, batch=24, steps=4, checkpoint=ss.Checkpoint(every=2))
        Trainer(job, context, tmp_path).train(Never())
        source = tmp_path / "checkpoints"
        (tmp_path / "again").mkdir(exist_ok=True)
        again = Trainer(job, context, tmp_path / "again")
        list_all, loading.complete_checkpoints = (
            loading.complete_checkpoints,
            lambda folder: list_all(folder)[: -1 if context.rank == blind else None],
        )
        try:
            again.resume(source / "step-4" if named else source)
        finally:
            loading.complete_checkpoints = list_all
        return again.first_step

    assert pool.run(body, tmp_path) == [3 if blind == 0 and not named else 5] * 2


@pytest.mark.ranks(2)
def test_ranks_that_read_different_checkpoints_of_one_name_take_an_older_one(
    pool: RankPool, tmp_path: Path
) -> None:
    def body(context: RankContext) -> int:
        job = small_job(world_size=2, batch=24, steps=4, checkpoint=ss.Checkpoint(every=2))
        Trainer(job, context, tmp_path).train(Never())
        own = Path(shutil.copytree(tmp_path / "checkpoints", tmp_path / f"of-{context.rank}"))
        if context.rank == 1:
            rewritten(own / "step-4", lambda content: content["values"].update({"extra.step": 3}))
        (tmp_path / "again").mkdir(exist_ok=True)
        again = Trainer(job, context, tmp_path / "again")
        again.resume(own)
        return again.first_step

    assert pool.run(body, tmp_path) == [3, 3]


def test_a_folder_of_a_later_step_that_no_run_wrote_costs_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-99").mkdir(parents=True)
    trainer_in(tmp_path, checkpoint=ss.Checkpoint(every=1, keep=1)).train(Never())
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-4", "step-99"}


class Opens:
    """A pickle that makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.marker,)


def test_a_pickle_is_never_read(copy: Path) -> None:
    import pickle

    emptied(copy / "step-4")
    (copy / "step-4/.metadata").write_bytes(pickle.dumps(Opens(copy / "marker")))
    with pytest.raises(CheckpointError, match=r"step-4 is damaged"):
        trainer_in(copy.parent / "again").resume(copy / "step-4")
    assert not (copy / "marker").exists()


@pytest.fixture(autouse=True)
def _random_state_of_the_tests() -> Iterator[None]:
    kept = torch.get_rng_state()
    yield
    torch.set_rng_state(kept)
