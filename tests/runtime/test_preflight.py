"""Before a job starts: what does not fit is refused, and what cannot be predicted is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor, nn

import shardscope as ss
from shardscope.cli import main
from shardscope.runtime import preflight as home
from shardscope.runtime.preflight import preflight

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=3, device="cpu")
TOO_LARGE = JOB.replace(batch=2**30)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))


def test_a_job_that_fits_has_its_time_and_its_bytes_in_a_line() -> None:
    found = preflight(JOB)
    assert found.refusal is None
    assert str(found).startswith("about ")
    assert "of memory in all" in str(found)


def test_a_job_that_does_not_fit_is_not_launched(tmp_path: Path) -> None:
    with pytest.raises(ss.LaunchError, match=r"it would take .* GiB that this machine has.*preflight=False"):
        ss.launch(TOO_LARGE, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_is_launched_all_the_same_where_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "usable_memory_bytes", lambda: 1000)
    with pytest.raises(ss.LaunchError, match="the job does not fit"):
        ss.launch(JOB, root=tmp_path)
    assert len(ss.launch(JOB, root=tmp_path, preflight=False).wait(60).metrics()) == 3


def test_ones_own_model_is_looked_at_and_ones_own_data_is_not() -> None:
    assert preflight(JOB.replace(model=Own)).prediction is not None

    def data() -> tuple[Tensor, Tensor]:
        raise AssertionError("nobody may call this here")

    found = preflight(JOB.replace(model=Own, data=data))
    assert (found.prediction, found.refusal) == (None, None)
    assert str(found) == "nothing could be predicted"


def test_a_model_that_fails_on_shapes_is_left_to_its_ranks() -> None:
    class Fails(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise KeyError("a defect of the user's")

    assert preflight(JOB.replace(model=Fails)).prediction is None


def test_without_torch_the_launch_server_traces() -> None:
    """In a process that never imports torch: the trace is the same, and the job runs."""
    code = (
        "import sys, shardscope as ss; from shardscope.runtime.preflight import preflight;"
        "job = ss.Job(model='mlp', data='digits', world_size=2, device='cpu');"
        "print(preflight(job).prediction.peak_bytes, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    here = preflight(ss.Job(model="mlp", data="digits", world_size=2, device="cpu")).prediction
    assert here is not None
    assert done.stdout.split() == [str(here.peak_bytes), "False"]


def test_the_command_line_predicts_refuses_and_runs_anyway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["run", "--model", "mlp", "--ranks", "2", "--steps", "3", "--device", "cpu"]
    assert main([*options, "--predict"]) == 0
    assert "ring_all_reduce" in capsys.readouterr().out
    assert main([*options, "--predict", "--batch", str(2**30)]) == 1
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    assert main([*options, "--batch", str(2**30)]) != 0
    assert "--anyway" in capsys.readouterr().err
    assert main([*options, "--tokens", "5"]) != 0
    assert "--tokens has no effect without --predict" in capsys.readouterr().err
