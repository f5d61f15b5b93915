"""Faults that are added to a run while it trains: `Run.inject`."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import shardscope as ss
from conformance.runs import small_job, wait_for
from shardscope.runtime.record.inject import PlanWatch, inject
from shardscope.runtime.record.rundir import RunDir

pytestmark = pytest.mark.timeout(120)
WITHIN_S = 90


@pytest.fixture
def running(tmp_path):
    """A run of two ranks that goes on until it is stopped."""
    job = small_job(
        strategy="ring", world_size=2, steps=100_000, checkpoint=ss.Checkpoint(every=20), recovery=2
    )
    run = ss.launch(job, root=tmp_path)
    wait_for(lambda: run.reduced().last_step > 25, run)
    yield run
    run.stop()


def test_a_rank_is_killed_although_its_step_has_passed_and_the_run_recovers(running: ss.Run) -> None:
    running.inject("kill rank=1 step=1")
    wait_for(
        lambda: running.reduced().restarts and running.reduced().restarts[0].recovered_t, running, WITHIN_S
    )
    (fault,), (restart,) = running.events("fault"), running.reduced().restarts
    assert (fault["rank"], fault["number"], restart.failed_rank) == (1, 0, 1)
    assert fault["step"] > 25
    assert running.newest_checkpoint is not None
    assert restart.step <= running.newest_checkpoint
    done = running.reduced().last_step
    wait_for(lambda: running.reduced().last_step > done + 20, running)  # it is not killed again
    assert running.restarts == 1


def test_a_rank_is_slowed_from_now_on_for_as_many_steps_as_asked(running: ss.Run) -> None:
    running.inject(ss.Faults().slow(1, factor=50, steps=(1, 10)))
    wait_for(lambda: running.events("fault"), running, WITHIN_S)
    first = running.events("fault")[0]["step"]
    wait_for(lambda: running.reduced().last_step > first + 30, running, WITHIN_S)
    times = running.metrics().set_index("step").step_time_s
    assert times[first : first + 9].median() > 3 * times[first - 15 : first - 1].median()
    assert times[first + 11 : first + 25].median() < times[first : first + 9].median() / 3


def test_what_cannot_occur_is_refused(running: ss.Run) -> None:
    for faults, told in (
        ("kill rank=2 step=40", "the job's ranks are 0 to 1"), ("kill rank=1 at=3s", "give step=... instead"),
        ("drop_link link=n1 step=40", "only emulated clusters"), ("", "inject needs at least one fault"),
    ):  # fmt: skip
        with pytest.raises(ss.SpecError, match=told):
            running.inject(faults)
    running.stop()
    with pytest.raises(ss.SpecError, match=r"has ended \(stopped\)"):
        running.inject("kill rank=1 step=40")
    assert running.events("fault") == []


def test_a_rank_that_an_elastic_run_does_not_have_now_is_refused(tmp_path: Path) -> None:
    job = small_job(world_size=4, batch=48, elastic="2:4")
    run = RunDir.create(job, tmp_path)
    inject(run, job, None, "kill rank=3 step=4")
    with pytest.raises(ss.SpecError, match=r"names rank 3, but the run now has ranks 0 to 1; give one"):
        inject(run, job.at_size(2), None, "kill rank=3 step=4")
    assert len(run.read_faults()) == 1


def test_faults_that_are_added_at_once_are_all_kept_and_seen_within_a_tenth_of_a_second(
    tmp_path: Path,
) -> None:
    job = small_job(steps=100)
    run = RunDir.create(job, tmp_path)
    watch = PlanWatch(run)
    assert watch() is None
    threads = [
        threading.Thread(target=inject, args=(run, job, None, f"slow rank=1 factor=2 steps={step}-{step}"))
        for step in range(1, 17)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(fault.steps[0] for fault in run.read_faults()) == list(range(1, 17))
    time.sleep(0.11)
    assert watch() == run.read_faults()
    inject(run, job, None, "kill rank=1 step=40")
    assert watch() is None, "it has looked just before"
    time.sleep(0.11)
    assert watch() == run.read_faults()
