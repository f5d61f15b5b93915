"""Bad input: one clear error each; nothing hangs, nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.runs import small_job
from shardscope.runlog.writer import EventWriter
from shardscope.runtime import worker
from shardscope.runtime.record.rundir import RunDir


def failed(job: ss.Job) -> ss.RunFailed:
    run = ss.launch(job)
    with pytest.raises(ss.RunFailed) as error:
        run.wait(60)
    assert run.state == "failed"
    return error.value


def test_a_missing_file_is_named() -> None:
    error = failed(small_job(model=lambda: nn.Linear(8, 8), data="/no/such/file.npz"))
    assert "/no/such/file.npz" in str(error)
    assert error.traceback == ""


def test_a_module_that_raises_says_which_rank_and_step() -> None:
    def make_model() -> nn.Module:
        class Raises(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(64, 10)
                self.calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                if self.calls == 3 and os.environ["RANK"] == "1":
                    raise KeyError("no such layer")
                return self.layer(x.flatten(1))

        return Raises()

    error = failed(small_job(model=make_model))
    assert (error.rank, error.step, error.strategy) == (1, 3, "ring")
    assert "KeyError: 'no such layer'" in str(error)
    assert "in forward" in error.traceback


def test_a_model_function_that_returns_no_module_is_refused() -> None:
    error = failed(small_job(model=lambda: 3))
    assert "return a torch.nn.Module" in str(error)


def test_a_model_without_anything_to_train_is_refused() -> None:
    error = failed(small_job(model=lambda: nn.Linear(64, 10).requires_grad_(False)))
    assert "model of type Linear has no trainable parameter" in str(error)


def test_complex_tensors_are_refused_instead_of_losing_their_imaginary_parts() -> None:
    """Casting them to the precision of the job did so; rotary embeddings are often kept as a complex buffer."""

    def make_model() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        model.register_buffer("freqs", torch.polar(torch.ones(8), torch.arange(8.0)))
        return model

    error = failed(small_job(model=make_model))
    assert "has the buffer 'freqs' of complex64, but jobs train real numbers; store it with" in str(error)
    with torch.device("meta"):
        without_values = nn.Linear(64, 10)
    assert "'weight' on the meta device, without values" in str(failed(small_job(model=without_values)))


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["single", "all-reduce", "ring"])
def test_a_loss_that_is_no_number_ends_the_run(strategy: str) -> None:
    job = small_job(
        strategy=strategy,
        world_size=1 if strategy == "single" else 2,
        loss=lambda o, t: o.sum() * float("nan"),
    )
    error = failed(job)
    assert "the loss became nan" in str(error)
    assert error.step == 1


def test_a_rank_that_calls_exit_is_named() -> None:
    def make_model() -> nn.Module:
        if os.environ["RANK"] == "1":
            os._exit(7)
        return nn.Linear(64, 10)

    assert "rank 1 of strategy 'ring' ended with exit code 7" in str(failed(small_job(model=make_model)))


def test_code_that_cannot_be_sent_is_refused_at_once() -> None:
    lock = threading.Lock()

    def make_model() -> nn.Module:
        with lock:
            return nn.Linear(64, 10)

    with pytest.raises(ss.errors.LaunchError, match="model=make_model cannot be sent to the ranks"):
        ss.launch(small_job(model=make_model))
    assert ss.runs() == []


def test_a_root_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ss.errors.LaunchError, match="cannot write the run directory"):
        ss.launch(small_job(), root=tmp_path / "file")


def test_resuming_from_nothing_says_so() -> None:
    earlier = ss.launch(small_job()).wait(60)
    run = ss.launch(small_job(), resume=earlier)
    with pytest.raises(ss.RunFailed, match="no complete checkpoint"):
        run.wait(60)


def test_resuming_another_model_says_so() -> None:
    earlier = ss.launch(small_job(checkpoint=ss.Checkpoint(at_end=True))).wait(60)
    run = ss.launch(small_job(model="cnn"), resume=earlier)
    with pytest.raises(ss.RunFailed, match="does not fit this model"):
        run.wait(60)


FULL_DISK = """
    import os, sys
    import shardscope as ss
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=1_000_000)
    run = ss.launch(job, root=sys.argv[1])
    try:
        run.wait(60)
    except ss.RunFailed as error:
        print(error.rank, str(error).splitlines()[0])
    again = ss.Run.attach(run.path)
    print(again.state, len(again.metrics()) > 10)
    ss.runtime.shut_down()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None, reason="needs unshare (util-linux) to mount a small disk"
)
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    script = (
        f'mount -t tmpfs -o size=600k none {tmp_path} && exec {sys.executable} -c "$CODE" {tmp_path}/runs'
    )
    done = subprocess.run(
        ["unshare", "-Urm", "bash", "-c", script], capture_output=True, text=True, timeout=240,
        env={**os.environ, "CODE": textwrap.dedent(FULL_DISK)},
    )  # fmt: skip
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("this system lets no user mount a file system of his own")
    first, last = done.stdout.strip().splitlines()
    assert "No space left on device" in first, done.stderr
    assert last == "failed True"


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/data/train.bin"), OSError(28, "full")]
)
def test_a_file_of_the_users_own_is_not_taken_for_the_run_directory(error: OSError, tmp_path: Path) -> None:
    try:
        raise error
    except OSError as raised:
        told = worker._describe(raised, None, RunDir(tmp_path))
    assert "SHARDSCOPE_RUNS" not in str(told["message"])
    assert "Traceback" in str(told["traceback"])


def test_what_the_run_directory_refuses_comes_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    def described() -> dict[str, object]:
        with EventWriter(tmp_path / "rank-0.jsonl", 0) as events, monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            try:
                events.emit("end", state="completed")
            except OSError as error:
                return worker._describe(error, None, RunDir(tmp_path))
        raise AssertionError("it was written")

    for told in (
        described(),
        worker._describe(PermissionError(13, "no", str(tmp_path / "x")), None, RunDir(tmp_path)),
    ):
        assert "SHARDSCOPE_RUNS" in str(told["message"])
        assert told["traceback"] == ""
