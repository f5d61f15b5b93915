"""A training loop on one process, observed: steps, endings, what the context leaves behind, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardscope as ss

Loop = Callable[[nn.Module, torch.optim.Optimizer], list[float]]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(6, 5, generator=generator)), torch.ones(6, 2))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parts(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 2))
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def test_losses_are_equal_to_the_bit_and_in_the_run(tmp_path: Path) -> None:
    alone = train(*parts())
    model, optimizer = parts()
    with ss.observe(model, optimizer, root=tmp_path) as run:
        assert run.state == "running"
        losses = train(model, optimizer)
    assert losses == alone == run.metrics()["loss"].tolist()
    assert (run.state, run.summary().steps, run.job.steps) == ("completed", 4, 4)
    assert (run.path / "summary.json").exists()
    assert [found.id for found in ss.runs(tmp_path)] == [run.id]
    again = ss.Run.attach(run.path)
    assert again.summary() == run.summary()
    assert set(again.timeline()["name"]) == {"forward", "backward", "optimizer"}


def test_an_optimizer_that_is_made_inside_is_found(tmp_path: Path) -> None:
    model, _ = parts()
    other = nn.Linear(2, 2)
    with ss.observe(model, root=tmp_path, name="trainer") as run:
        torch.optim.AdamW(other.parameters()).step()  # no parameter of the model
        train(model, torch.optim.Adam(model.parameters()))
    assert (run.job.optimizer.name, run.job.optimizer.settings["lr"]) == ("Adam", 0.001)
    assert run.summary().steps == 4


def test_evaluations_belong_to_no_step(tmp_path: Path) -> None:
    model, optimizer = parts()
    with ss.observe(model, optimizer, root=tmp_path) as run:
        train(model, optimizer, 1)
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(50, 5))
        train(model, optimizer, 1)
    assert [event["samples"] for event in run.events("step")] == [6, 6]
    assert len(run.timeline().query("name == 'forward'")) == 2


def test_an_optimizer_with_a_closure_steps_once(tmp_path: Path) -> None:
    model, _ = parts()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(6, 5)).square().mean()
        loss.backward()
        return loss

    with ss.observe(model, optimizer, root=tmp_path) as run:
        optimizer.step(closure)
    (event,) = run.events("step")
    names = [name for _, name, *_ in event["spans"]]
    assert names.count("forward") == names.count("backward") == 3
    update = next(row for row in event["spans"] if row[1] == "optimizer")
    assert update[2] >= max(row[3] for row in event["spans"] if row[1] == "backward")


def test_an_error_of_the_script_is_recorded_and_raised(tmp_path: Path) -> None:
    model, optimizer = parts()
    error = ZeroDivisionError("of the script")
    with (
        pytest.raises(ZeroDivisionError) as caught,
        ss.observe(model, optimizer, root=tmp_path) as run,
    ):
        train(model, optimizer, 2)
        raise error
    assert caught.value is error
    assert run.state == "failed"
    with pytest.raises(ss.RunFailed, match="rank 0 failed: ZeroDivisionError: of the script") as failed:
        run.wait()
    assert (failed.value.rank, failed.value.step) == (0, 3)
    assert run.summary().steps == 2


def test_an_interrupt_stops_the_run(tmp_path: Path) -> None:
    model, optimizer = parts()
    with pytest.raises(KeyboardInterrupt), ss.observe(model, optimizer, root=tmp_path) as run:
        raise KeyboardInterrupt
    assert (run.state, run.reason) == ("stopped", "interrupted")


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_afterwards(tmp_path: Path, *, fails: bool) -> None:
    optim = import_module("torch.optim.optimizer")
    model, optimizer = parts()
    before = torch.autograd.backward, dist.Work.wait
    with suppress(ZeroDivisionError), ss.observe(model, optimizer, root=tmp_path) as run:
        train(model, optimizer, 1)
        1 / (not fails)
    assert run.state == ("failed" if fails else "completed")
    written = contents(run.path)
    train(model, optimizer, 2)
    assert contents(run.path) == written
    assert (torch.autograd.backward, dist.Work.wait) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not optim._global_optimizer_pre_hooks
    assert not optim._global_optimizer_post_hooks


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_directory_that_is_lost_ends_the_recording_but_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from shardscope.runlog.writer import EventWriter

    model, optimizer = parts()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with ss.observe(model, optimizer, root=tmp_path) as run:
        first = train(model, optimizer, 2)
        with monkeypatch.context() as patched:
            patched.setattr(EventWriter, "_write", full)
            first += train(model, optimizer, 2)
    assert all(map(math.isfinite, first))
    assert "No space left on device" in caplog.text
    assert run.reason is not None
    assert "stopped recording" in run.reason
    assert run.summary().steps == 2


def test_what_is_observed_cannot_be_launched_stopped_or_observed_twice(tmp_path: Path) -> None:
    model, optimizer = parts()
    with ss.observe(model, optimizer, root=tmp_path, name="mine") as run:
        with pytest.raises(ss.SpecError, match="end the script"):
            run.stop()
        with pytest.raises(ss.SpecError, match="already being observed"), ss.observe(model, optimizer):
            pass
    for attempt in (lambda: ss.launch(run.job), lambda: ss.load_job(run)):
        with pytest.raises(
            ss.SpecError, match="'mine' was observed in a training script .* run the script again"
        ):
            attempt()
    with pytest.raises(ss.SpecError, match=r"was observed in a training script by ss\.observe"):
        ss.Job(model="mlp", data="digits", strategy=run.job.strategy).require_code()
    with pytest.raises(ss.SpecError, match=r"is not an nn\.Module"):
        ss.observe("model", optimizer)  # type: ignore[arg-type]


def test_a_script_that_is_killed_leaves_a_failed_run(tmp_path: Path) -> None:
    code = (
        "import os, signal, torch, shardscope as ss\n"
        "model = torch.nn.Linear(3, 1)\n"
        f"with ss.observe(model, torch.optim.SGD(model.parameters()), root={str(tmp_path)!r}):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=100)
    (run,) = ss.runs(tmp_path)
    assert run.state == "failed"
    assert "ended before its training loop was complete" in str(run.error)
