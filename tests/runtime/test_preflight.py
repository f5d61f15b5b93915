"""Before a job starts: what does not fit is refused, and what cannot be predicted is not."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from shardscope.cli import main
from shardscope.prediction import _torch_trace
from shardscope.prediction.traced import traced
from shardscope.runtime.launcher import preflight as home
from shardscope.runtime.launcher.driver_server import driver, trace_on_server
from shardscope.runtime.launcher.preflight import memory_needed, predicted_at_launch, preflight
from shardscope.runtime.record.launch_prediction import LaunchPrediction

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=3, device="cpu")


def test_a_job_that_fits_has_its_time_and_its_bytes_in_a_line() -> None:
    found = preflight(JOB)
    assert found.refusal is None
    assert str(found).startswith("Predicted for global batch ")
    assert ": less than a second of training once started, " in str(found)
    assert "of memory in all" in str(found)


def test_a_job_on_gpus_has_its_memory_and_no_time_in_a_line() -> None:
    found = preflight(JOB.replace(device="cuda"))
    assert (found.refusal, found.memory, found.run_time_s) == (None, None, None)
    assert "of memory on the rank with the highest peak, but no step time: the ranks compute on GPUs" in str(
        found
    )
    assert memory_needed(JOB.replace(device="cuda")) is None


def test_a_job_that_does_not_fit_is_not_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "usable_memory_bytes", lambda: 1e6)
    with pytest.raises(
        ss.errors.LaunchError, match=r"it would take .* MB that this machine has.*preflight=False"
    ):
        ss.launch(JOB, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_is_launched_all_the_same_where_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "usable_memory_bytes", lambda: 1000)
    with pytest.raises(ss.errors.LaunchError, match="the job does not fit"):
        ss.launch(JOB, root=tmp_path)
    assert len(ss.launch(JOB, root=tmp_path, preflight=False).wait(60).metrics()) == 3


def test_memory_is_predicted_once_for_jobs_that_need_equally_much(monkeypatch: pytest.MonkeyPatch) -> None:
    first = memory_needed(JOB)
    assert first is not None
    monkeypatch.setattr(home, "predict_job", lambda *_, **__: pytest.fail("predicted again"))
    same = JOB.replace(seed=9, name="again", optimizer=JOB.optimizer.replace(lr=0.25))
    assert memory_needed(same) == first
    monkeypatch.undo()
    larger = memory_needed(JOB.replace(batch=512))
    assert larger is not None
    assert larger.peak_bytes > first.peak_bytes


def test_functions_of_ones_own_are_left_to_the_ranks() -> None:
    def function(*_: object) -> Any:
        raise AssertionError("nobody may call this here")

    for place in ("model", "data", "loss"):
        found = preflight(JOB.replace(**{place: function}))
        assert (found.prediction, found.refusal) == (None, None)
        assert str(found) == "Nothing could be predicted."


def test_a_model_that_fails_on_shapes_is_left_to_its_ranks() -> None:
    class Fails(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise KeyError("a defect of the user's")

    assert preflight(JOB.replace(model=Fails)).prediction is None


@pytest.mark.parametrize("leave", [SystemExit(3), RuntimeError("no"), MemoryError()])
def test_a_model_function_that_fails_or_leaves_stops_nothing(leave: BaseException) -> None:
    def model() -> nn.Module:
        torch.manual_seed(7)
        random.seed(7)
        raise leave

    before = torch.get_rng_state(), random.getstate()
    assert preflight(JOB.replace(model=model)).prediction is None
    with pytest.raises(ss.SpecError, match="cannot be traced on the meta device"):
        ss.predict(JOB.replace(model=model))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_a_strategy_whose_formula_fails_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ss.Ring, "states", fails)
    found = preflight(JOB)
    assert (found.prediction, found.refusal) == (None, None)


def test_a_huge_batch_is_traced_without_being_made() -> None:
    for precision in ("fp32", "bf16-mixed"):
        assert preflight(JOB.replace(batch=2**30, precision=precision)).refusal is not None


@pytest.mark.slow
def test_the_server_says_so_when_the_child_that_traces_is_killed() -> None:
    """At once, and the next trace is made."""
    server = driver.server()
    asked = ss.Job(model="gpt-124m", data="python-source", strategy="single", batch=2).to_json()
    process = psutil.Process(server.pid)
    agents = set(process.children())  # of runs that earlier tests started
    with ThreadPoolExecutor() as pool:
        error = None
        while error is None:  # on a busy machine a child may be done before it is seen
            waiting = pool.submit(trace_on_server, asked)
            while not (tracing := set(process.children()) - agents) and not waiting.done():
                time.sleep(0.001)
            for child in tracing:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            error = waiting.exception(30)
    assert isinstance(error, ss.SpecError)
    assert "was killed" in str(error)
    assert trace_on_server(asked).startswith("{")


def test_a_trace_is_made_once_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process, here one that has forgotten its traces, reads it from disk, unless the file is damaged."""
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path))
    found = []
    for damage in (False, False, True):
        monkeypatch.setattr("shardscope.prediction.traced._KNOWN", {})
        for file in tmp_path.iterdir() if damage else ():
            file.write_text(file.read_text()[:100])
        asked: list[ss.Job] = []
        real = _torch_trace.trace
        monkeypatch.setattr(
            _torch_trace,
            "trace",
            lambda job, *, builds, real=real, asked=asked: asked.append(job) or real(job),
        )
        found.append((traced(JOB), len(asked)))
        monkeypatch.setattr(_torch_trace, "trace", real)
    assert [count for _, count in found] == [1, 0, 1]
    assert found[0][0] == found[1][0] == found[2][0]
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr("shardscope.prediction.traced._KNOWN", {})
    tmp_path.chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by other users; .* traces of models are not cached"):
        traced(JOB)
    assert list(tmp_path.iterdir()) == []


def test_data_that_were_written_anew_are_traced_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    seen = []
    for width in (8, 12):
        rows = np.zeros((40, width), np.float32)
        np.savez(path, x=rows, y=np.zeros(40, np.int64), x_test=rows, y_test=np.zeros(40, np.int64))
        model = partial(nn.Linear, width, 10)
        seen.append(traced(JOB.replace(model=model, data=str(path), batch=8)).sample_bytes)
    assert seen == [4 * 8 + 8, 4 * 12 + 8]


@pytest.mark.slow
def test_without_torch_the_launch_server_traces() -> None:
    """In a process that never imports torch: the trace is the same, and the job runs."""
    code = (
        "import sys, shardscope as ss; from shardscope.runtime.launcher.preflight import preflight;"
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
    monkeypatch.setattr("shardscope.runtime.launcher.preflight.usable_memory_bytes", lambda: 1e6)
    assert main(options) != 0
    assert "--anyway" in capsys.readouterr().err
    assert main([*options, "--tokens", "5"]) != 0
    assert "--tokens has no effect without --predict" in capsys.readouterr().err


def test_a_formula_of_time_that_fails_leaves_the_check_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise ZeroDivisionError

    job = JOB.replace(steps=7)
    expected = memory_needed(job)
    monkeypatch.setattr(LaunchPrediction, "of", fails)
    found = predicted_at_launch(job.replace(steps=8))
    assert found.step is None
    assert found.memory == expected is not None
