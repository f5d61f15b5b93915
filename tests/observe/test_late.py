"""Ranks that meet only inside the block: launched by the trainer itself, or by `torch.multiprocessing`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss

SCRIPT = Path(__file__).with_name("late.py")


def run_script(how: str, folder: Path) -> None:
    unset = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), how, str(folder)],
        capture_output=True, text=True, timeout=280, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spawned")
    run_script("spawn", folder)
    return folder


def warnings(folder: Path, kind: str) -> list[list[str]]:
    """The warnings that each rank got."""
    told: list[dict[str, Any]] = [
        json.loads((folder / f"warnings-{rank}.json").read_text()) for rank in (0, 1)
    ]
    return [one[kind] for one in told]


def check_complete(folder: Path) -> None:
    (run,) = ss.runs(folder)
    assert [path.name for path in folder.iterdir()] == [run.path.name]
    assert (run.state, run.reason, run.job.world_size) == ("completed", None, 2)
    assert run.job.strategy.label == "observed (DDP)"
    assert {(event["rank"], event["world_size"]) for event in run.events("start")} == {(0, 2), (1, 2)}
    for rank in (0, 1):
        steps = run.events("step", rank)
        assert [(event["step"], event["samples"]) for event in steps] == [(1, 4), (2, 4)]
        assert all("all_reduce" in event["traffic"] for event in steps)
    assert run.provenance is not None


def test_a_trainer_that_launches_the_other_ranks_is_one_run(tmp_path: Path) -> None:
    run_script("launcher", tmp_path)
    check_complete(tmp_path / "launcher")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["late", "sanity pass"])
def test_spawned_processes_leave_one_run(spawned: Path, kind: str) -> None:
    check_complete(spawned / kind)
    assert warnings(spawned, kind) == [[], []]


@pytest.mark.slow
def test_an_error_on_rank_0_ends_the_recording_on_all_ranks_with_one_warning(spawned: Path) -> None:
    for told in warnings(spawned, "refused"):
        (message,) = told
        assert "cannot be described" in message
        assert message.endswith("the training continues")
    assert list((spawned / "refused").iterdir()) == []


@pytest.mark.slow
def test_a_rank_does_not_wait_for_one_that_is_not_observed(spawned: Path) -> None:
    none, (message,) = warnings(spawned, "on rank 1 only")
    assert none == []
    assert "call ss.observe on every rank" in message
