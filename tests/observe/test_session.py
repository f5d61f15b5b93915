"""An observed block from its start to its end, when a part of the observer fails or is slow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardscope as ss
from observe.steps import train
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.observe._describe import Seen
from shardscope.runtime.observe._loop import Loop
from shardscope.runtime.record import provenance


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(5, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def fails(error: Exception) -> Callable[..., Any]:
    def failing(*_: object, **__: object) -> None:
        raise error

    return failing


FULL = OSError(28, "No space left on device")


def test_a_full_disk_stops_the_recording_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = parts()
    with ss.observe(model, optimizer, root=tmp_path) as run:
        train(model, optimizer, 2)
        monkeypatch.setattr(EventWriter, "_write", fails(FULL))
        train(model, optimizer, 2)
    assert len(caplog.records) == 1
    assert (run.state, run.cause, run.state_text) == ("stopped", "recording-stopped", "recording stopped")
    assert run.reason is not None
    assert "No space left on device" in run.reason
    assert not (run.path / "reserve").exists()
    assert run.summary().steps == 2


def test_an_error_of_the_script_is_recorded_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = parts()
    with (
        pytest.raises(ZeroDivisionError, match="of the script"),
        ss.observe(model, optimizer, root=tmp_path) as run,
    ):
        train(model, optimizer, 2)
        monkeypatch.setattr(EventWriter, "_write", fails(FULL))
        raise ZeroDivisionError("of the script")
    assert run.state == "failed"
    assert run.error is not None
    assert "rank 0 failed: ZeroDivisionError: of the script" in str(run.error)


@pytest.mark.parametrize("error", [ss.SpecError("no such job"), RuntimeError("lazy"), TypeError("other")])
def test_a_loop_that_cannot_be_described_trains_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr(Seen, "job", fails(error))
    model, optimizer = parts()
    before = model.weight.clone()
    with ss.observe(model, optimizer, root=tmp_path):
        train(model, optimizer, 2)
    assert not torch.equal(model.weight, before)
    (record,) = caplog.records
    assert str(error) in record.getMessage()
    assert list(tmp_path.iterdir()) == []


def test_lazy_modules_are_described_once_they_have_shapes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(9), nn.LazyBatchNorm1d(), nn.Linear(9, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ss.observe(model, optimizer, root=tmp_path) as run:
        train(model, optimizer, 3)
    assert (run.state, run.reason) == ("completed", None)
    (start,) = run.events("start")
    assert start["num_params"] == sum(parameter.numel() for parameter in model.parameters())
    assert ss.compare(run).disagreeing == ()


def test_hooks_that_cannot_be_installed_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.autograd.backward, dist.Work.wait
    model, optimizer = parts()
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_watch_backward", fails(RuntimeError("no hooks")))
        with ss.observe(model, optimizer, root=tmp_path / "first") as run:
            assert not model._forward_hooks
            train(model, optimizer, 2)
    assert "no hooks" in caplog.text
    assert (torch.autograd.backward, dist.Work.wait) == before
    assert run.state == "stopped"
    with ss.observe(model, optimizer, root=tmp_path / "second") as run:
        train(model, optimizer, 2)
    assert run.summary().steps == 2


def test_a_slow_git_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_trained = threading.Event()

    def slow(_: Path) -> tuple[str, bool]:
        return ("of this commit", False) if has_trained.wait(30) else ("too late", False)

    monkeypatch.setattr(provenance, "_git_state", slow)
    model, optimizer = parts()
    with ss.observe(model, optimizer, root=tmp_path) as run:
        train(model, optimizer, 2)
        assert run.provenance is None
        has_trained.set()
    assert run.provenance is not None
    assert run.provenance.commit == "of this commit"
