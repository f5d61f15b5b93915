"""Ranks that join or leave take the state from the host's memory if the run keeps copies there, not from the disk."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

import shardscope as ss
from conformance.elastic import STEPS, apart, elastic_job, fixed, resized
from conformance.runs import freeze, wait_for
from shardscope.errors import CheckpointError
from shardscope.training.checkpoint import writing

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
BOUND = 1e-5
"""That of the equivalence of a job with the same job on one process."""


def in_memory(**changes: object) -> ss.Job:
    """An elastic job that keeps copies in memory, of which none is due before its end."""
    return elastic_job(recovery=ss.Recovery(1, replica_every=1000), **changes)


@pytest.mark.parametrize(
    "strategy",
    [
        "zero-3",
        *(
            pytest.param(each, marks=pytest.mark.weekly)
            for each in ("ring", "pipeline:1f1b", "parameter-server")
        ),
    ],
)
def test_nothing_is_written_to_the_disk_and_the_end_is_the_same(strategy: str) -> None:
    job = in_memory(strategy=strategy)
    run = resized(job, 4, 3)
    log = run.reduced()
    assert [(each.before, each.after, each.source) for each in log.resizes] == [
        (2, 4, "replica"),
        (4, 3, "replica"),
    ]
    assert not log.restarts
    assert list(log.steps.column("number")) == list(range(1, STEPS + 1))
    assert not run.events("checkpoint")
    assert not list((run.path / "checkpoints").iterdir())
    copied = [event["step"] for event in run.events("replica", rank=0)]
    assert copied == [each.step - 1 for each in log.resizes]
    assert max(apart(run, fixed(job.replace(recovery=None)))) < BOUND


@pytest.mark.weekly
def test_an_asynchronous_run_hands_over_too() -> None:
    run = resized(in_memory(strategy="parameter-server:async", optimizer="adamw"), 4, 2)
    assert [each.source for each in run.reduced().resizes] == ["replica"] * 2
    assert run.summary().last_step == STEPS


@pytest.mark.slow
def test_a_run_that_ends_after_a_resize_leaves_the_handed_over_state_on_the_disk() -> None:
    run = ss.launch(in_memory(steps=1_000_000))
    wait_for(lambda: run.reduced().last_step >= 2, run)
    run.resize(4)
    wait_for(lambda: run.reduced().resizes, run)
    freeze([event["pid"] for event in run.events("start") if event["world_size"] == 4])
    run.stop(grace_s=0.0)  # the ranks cannot save anything themselves
    (resize,) = run.reduced().resizes
    assert (run.state, run.newest_checkpoint) == ("stopped", resize.step - 1)
    again = ss.launch(run.job.replace(steps=resize.step + 1, recovery=None), resume=run).wait(60)
    assert [event["step"] for event in again.events("resume", rank=0)] == [resize.step - 1]


@pytest.mark.slow
def test_a_run_that_cannot_leave_it_there_says_so() -> None:
    run = ss.launch(in_memory(steps=1_000_000))
    wait_for(lambda: run.reduced().last_step >= 2, run)
    run.resize(4)
    wait_for(lambda: run.reduced().resizes, run)
    freeze([event["pid"] for event in run.events("start") if event["world_size"] == 4])
    (run.path / "checkpoints").rmdir()
    (run.path / "checkpoints").touch()  # root could write to a folder without permissions
    run.stop(grace_s=0.0)
    step = run.reduced().resizes[0].step - 1
    assert (run.state, run.newest_checkpoint) == ("stopped", None)
    assert re.search(
        rf"; its newest copy in memory is lost: Not a directory while writing checkpoint step-{step} in "
        rf"{re.escape(str(run.path.resolve() / 'checkpoints'))}; there is no earlier checkpoint$",
        run.reason or "",
    )


def test_a_copy_that_does_not_fit_on_the_disk_leaves_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, disk = tmp_path / "memory" / "step-8", tmp_path / "disk"
    for folder in (copy, disk / "step-4"):
        folder.mkdir(parents=True)
    for rank in range(2):
        (copy / f"rank-{rank}.bin").write_bytes(bytes(3 * writing._COPIED_BYTES // 2))
    synced = []

    def sync(file: int) -> None:
        synced.append(os.fstat(file).st_size)
        if len(synced) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "fsync", sync)
        with pytest.raises(
            CheckpointError, match=r"^No space left .*; the newest .* is step-4; free some space"
        ):
            writing.copy_to_disk(copy, disk, keep=1)
    assert synced == [2**24, 3 * 2**23] * 2
    assert [path.name for path in disk.iterdir()] == ["step-4"]
    writing.copy_to_disk(copy, disk, keep=1)
    assert [path.name for path in disk.iterdir()] == ["step-8"]
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        path.name: path.read_bytes() for path in (disk / "step-8").iterdir()
    }
