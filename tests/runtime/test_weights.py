"""The weights of a run as a plain state dict, from what any strategy has saved."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.alone import Never
from conformance.ranks import RankPool
from conformance.runs import small_job
from shardscope import cli
from shardscope.errors import CheckpointError, SpecError
from shardscope.runtime.record.rundir import RunDir
from shardscope.training.checkpoint import index
from shardscope.training.checkpoint.index import verify
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer


class Tallied(nn.Module):
    """Has parameters, a buffer and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(64, 7), nn.BatchNorm1d(7), nn.Linear(7, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(images.flatten(1))))

    def get_extra_state(self) -> Any:
        return {"version": 3, "inside": {"names": ("a", "b")}}

    def set_extra_state(self, state: Any) -> None:
        assert state["version"] == 3


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.Linear(7, 10))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ss.Run:
    job = small_job(
        world_size=2,
        steps=4,
        checkpoint=ss.Checkpoint(every=2, at_end=True),
        record=ss.Record(parameters=True),
    )
    return ss.launch(job, root=tmp_path_factory.mktemp("weights")).wait(100)


def saved_run(job: ss.Job, folder: Path) -> ss.Run:
    """The run whose trainers have written to a folder."""
    return ss.Run(RunDir(folder), job)


@pytest.mark.parametrize(
    "strategy", ["ring", "zero-1", "zero-2", "zero-3", "pipeline", "gossip", "parameter-server"]
)
def test_every_strategy_saves_the_state_dict_of_the_plain_model(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    model = (
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.Linear(7, 10)))
        if strategy == "pipeline"
        else Tallied
    )
    batch = ss.Batch(24, micro_batch=3) if strategy == "pipeline" else 24
    job = small_job(
        model=model,
        strategy=strategy,
        world_size=pool.world_size,
        steps=2,
        batch=batch,
        checkpoint=ss.Checkpoint(at_end=True),
    )
    if strategy == "pipeline" and pool.world_size > 2:
        pytest.skip("the model has two layers")

    def body(context: RankContext) -> dict[str, torch.Tensor]:
        trainer = Trainer(job, context, tmp_path)
        trainer.train(Never())
        with torch.no_grad():
            return {
                name: p.clone() for name, p in trainer.model.state_dict().items() if name.endswith("weight")
            }

    ranks = pool.run(body, tmp_path)
    state = saved_run(job, tmp_path).state_dict(step=2)
    model().load_state_dict(state)
    assert all(type(value) is torch.Tensor for name, value in state.items() if name != "_extra_state")
    if strategy == "ring":
        assert all(torch.equal(state[name], whole) for name, whole in ranks[0].items())
        assert state["_extra_state"] == {"version": 3, "inside": {"names": ("a", "b")}}


def test_a_run_gives_the_weights_after_each_step_that_it_has_saved(run: ss.Run) -> None:
    first, last = run.state_dict(step=2), run.state_dict()
    with np.load(run.path / "parameters.npz") as file:
        named = {str(name): file[f"value-{number}"] for number, name in enumerate(file["names"])}
    assert {name: tensor.numpy().tobytes() for name, tensor in last.items()} == {
        name: value.tobytes() for name, value in named.items()
    }
    assert any(not torch.equal(first[name], last[name]) for name in last)
    with pytest.raises(CheckpointError, match=r"no weights of step=3; it has saved those of step 2, 4"):
        run.state_dict(step=3)


@pytest.mark.parametrize("step", ["4", 2.0, True])
def test_a_step_that_is_no_whole_number_is_refused(run: ss.Run, step: Any) -> None:
    with pytest.raises(SpecError, match=r"give a whole number, or None for the last saved step"):
        run.state_dict(step=step)
    assert run.state_dict(step=np.int64(4)).keys() == run.state_dict(step=4).keys()  # type: ignore[arg-type]


@pytest.mark.parametrize("is_gone", [False, True])
def test_weights_of_a_live_run_are_read_while_it_replaces_them(
    run: ss.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_gone: bool
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(run.path / "checkpoints/step-2", folder / "step-2")
    expected = run.state_dict(step=4)

    def replace(*found: Any) -> None:
        if not (folder / "step-4").exists():
            shutil.copytree(run.path / "checkpoints/step-4", folder / "step-4")
            next((folder / "step-2").glob("*.bin")).unlink()
            if is_gone:
                shutil.rmtree(folder / "step-2")
        verify(*found)

    monkeypatch.setattr(index, "verify", replace)
    live = saved_run(run.job, tmp_path).state_dict()
    assert all(torch.equal(live[name], value) for name, value in expected.items())
    with pytest.raises(CheckpointError, match="no weights of step=2" if is_gone else "bin is missing"):
        saved_run(run.job, tmp_path).state_dict(step=2)


def test_saved_parameters_serve_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    job = small_job(strategy="single", world_size=1, steps=2, record=ss.Record(parameters=True))
    run = ss.launch(job, root=tmp_path).wait(100)
    assert run.state_dict().keys() == run.state_dict(step=2).keys() != set()
    (run.path / "parameters.npz").write_bytes(b"not a file of arrays")
    with pytest.raises(CheckpointError, match="parameters"):
        run.state_dict()
    (run.path / "parameters.npz").unlink()
    with pytest.raises(CheckpointError, match="has saved no weights; launch it with"):
        run.state_dict()


def test_damage_and_pickles_are_refused(run: ss.Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step-9"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"a pickle")
    with pytest.raises(CheckpointError, match="index.json"):
        saved_run(run.job, tmp_path).state_dict()
    (folder / ".metadata").unlink()
    for path in (run.path / "checkpoints/step-4").iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".bin" and data:
            data[len(data) // 2] ^= 255
        (folder / path.name).write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"the weights of run .* in .*step-9 cannot be read: the bytes of"
    ):
        saved_run(run.job, tmp_path).state_dict()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_are_exported_by_the_suffix_of_the_path(run: ss.Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "deep" / f"weights.{suffix}"
    assert run.export(path) == str(path)
    if suffix == "pt":
        state = torch.load(path, weights_only=True)
    else:
        state = pytest.importorskip("safetensors.torch").load_file(path)
    expected = run.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    arguments = ["export", str(run.path), "--format", suffix, "--to", str(tmp_path / f"again.{suffix}")]
    assert cli.main(arguments) == 0
    assert (tmp_path / f"again.{suffix}").stat().st_size > sum(tensor.nbytes for tensor in expected.values())


def test_a_path_without_a_format_is_asked_for_one(run: ss.Run, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"does not determine what to write: give format, .*ends in \.pt or \.safetensors"
    ):
        run.export(tmp_path / "weights.bin")


def test_missing_safetensors_are_named(run: ss.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(SpecError, match="format='safetensors' needs safetensors, which cannot be imported"):
        run.export(tmp_path / "weights.safetensors")
