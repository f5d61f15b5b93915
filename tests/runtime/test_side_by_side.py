"""Kernels and users side by side, and more ranks than cores: nobody clashes, times out or sees others' memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardscope as ss
from conformance.ranks import RankPool
from conformance.runs import endless_job, rank_pids, small_job
from shardscope.training.context import RankContext
from shardscope.training.transports.shm.memory import SharedMemory

SCRIPT = """
import json, sys
import shardscope as ss
rows = []
for world_size in (2, 4):
    run = ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", world_size=world_size, steps=20)).wait()
    rows.append([run.summary().transport, [event["loss"] for event in run.events("step", rank=0)]])
print(json.dumps(rows))
"""
USERS = (65533, 65534)
as_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv to act as other users",
)


def started(folder: Path, *within: str) -> subprocess.Popen[str]:
    """A kernel that runs two jobs, with folders of its own."""
    env = {
        **os.environ, "SHARDSCOPE_RUNS": str(folder / "runs"), "SHARDSCOPE_CACHE": str(folder / "cache"),
        "HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    return subprocess.Popen(
        [*within, sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=env,
    )  # fmt: skip


def rows_of(kernels: list[subprocess.Popen[str]]) -> list[list[Any]]:
    """What the kernels print, once all have ended."""
    rows = []
    for kernel in kernels:
        printed, errors = kernel.communicate(timeout=240)
        assert kernel.returncode == 0, errors
        rows.append(json.loads(printed))
    return rows


@pytest.mark.slow
def test_two_kernels_at_once_do_not_clash(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    first, second = rows_of([started(folder) for folder in folders])
    assert first == second
    assert [transport for transport, _ in first] == ["shm", "shm"]
    assert all(len(losses) == 20 for _, losses in first)


@pytest.mark.slow
@as_root
def test_two_users_at_once_do_not_clash(tmp_path: Path) -> None:
    """Each may read all files, so that they can run the interpreter of these tests wherever it is."""
    tmp_path.chmod(0o755)
    kernels = []
    for user in USERS:
        folder = tmp_path / str(user)
        folder.mkdir()
        os.chown(folder, user, user)
        capabilities = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
        kernels.append(
            started(folder, "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *capabilities)
        )
    first, second = rows_of(kernels)
    assert first == second
    assert [transport for transport, _ in first] == ["shm", "shm"]


@pytest.mark.slow
@as_root
def test_no_other_user_can_open_the_memory_of_a_run() -> None:
    run = ss.launch(endless_job(transport="shm"))
    memories = [
        str(path)
        for pid in rank_pids(run).values()
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(path).startswith("/memfd:shardscope")
    ]
    own = [subprocess.run(["head", "-c", "16", path], capture_output=True, check=True) for path in memories]
    other = ["setpriv", f"--reuid={USERS[0]}", f"--regid={USERS[0]}", "--clear-groups"]
    refused = [
        subprocess.run([*other, "head", "-c", "16", path], capture_output=True, check=False)
        for path in memories
    ]
    run.stop()
    assert len(memories) >= 2
    assert (
        len({each.stdout for each in own}) == 1
    )  # both ranks have the same memory, whose first bytes are a token
    assert all(each.returncode and b"Permission denied" in each.stderr for each in refused)
    assert not any(each.stdout for each in refused)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "all-reduce"])
def test_eight_ranks_train_as_one_process_on_however_few_cores(strategy: str) -> None:
    fields: dict[str, Any] = {"model": "mlp", "data": "digits", "batch": 64, "steps": 10, "precision": "fp64"}
    alone = ss.launch(small_job(**{**fields, "strategy": "single", "world_size": 1})).wait()
    eight = ss.launch(
        small_job(**{**fields, "strategy": strategy, "world_size": 8, "transport": "shm"})
    ).wait()
    assert eight.summary().transport == "shm"
    assert eight.summary().loss == pytest.approx(alone.summary().loss, rel=1e-9)


def test_a_rank_that_waits_sleeps(pool: RankPool, tmp_path: Path) -> None:
    """It looks ten times a second whether the others are still there, and does nothing in between."""

    def body(context: RankContext) -> float:
        if context.group is None or context.group.route.name != "shm":
            pytest.skip("no shared memory on this machine")
        looks, wait = [0], SharedMemory.wait

        def counted(self: SharedMemory, word: int, value: int, seconds: float) -> None:
            looks[0] += 1
            wait(self, word, value, seconds)

        dist.barrier()
        SharedMemory.wait = counted  # type: ignore[method-assign]
        try:
            began = time.monotonic()
            if context.rank == 0:
                time.sleep(0.5)
            dist.all_reduce(torch.ones(1))
            if context.rank == 0:
                time.sleep(0.5)
                dist.send(torch.ones(1), dst=1)
            elif context.rank == 1:
                dist.recv(torch.ones(1), src=0)
            return looks[0] / (time.monotonic() - began)
        finally:
            SharedMemory.wait = wait  # type: ignore[method-assign]

    assert all(looks_per_s < 100 for looks_per_s in pool.run(body, tmp_path))
