"""Runs that recover: killed for real by a plan of faults, they end as the undisturbed run does."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import shardscope as ss
from conformance.runs import all_gone, family, losses, small_job, wait_for

pytestmark = pytest.mark.slow

EVERY, STEPS = 4, 12
WITHIN_S = 120


def job(**changes: object) -> ss.Job:
    return small_job(**{"steps": STEPS, "checkpoint": ss.Checkpoint(every=EVERY), "recovery": 2, **changes})


def undisturbed(run: ss.Run) -> list[float]:
    """Losses of the same job without faults."""
    return losses(ss.launch(run.job, run.cluster).wait(WITHIN_S))


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "zero-3", "pipeline", "parameter-server"])
def test_a_killed_rank_costs_only_the_steps_since_the_last_checkpoint(strategy: str) -> None:
    run = ss.launch(job(strategy=strategy), faults=ss.Faults().kill(1, step=7)).wait(WITHIN_S)
    assert run.state_text == "completed after 1 restart"
    assert losses(run) == undisturbed(run)
    summary = run.stored_summary
    assert summary is not None
    assert (summary.restarts, summary.steps, summary.last_step) == (1, STEPS, STEPS)
    assert summary.lost_steps <= 2  # 5 and 6
    assert summary.goodput is not None
    assert 0 < summary.goodput < 1
    (event,) = run.events("restart")
    assert (event["attempt"], event["failed_rank"], event["step"], event["source"]) == (1, 1, EVERY, "disk")
    assert event["cause"].startswith("rank 1")
    assert event["cause"].endswith("was killed by SIGKILL after step 6, as the fault plan requested")
    (fault,) = run.events("fault")
    assert (fault["rank"], fault["step"], fault["text"]) == (1, 7, "rank 1 killed before step 7")
    assert "completed after 1 restart" in run._repr_html_()


def test_without_a_checkpoint_it_begins_anew_and_each_fault_happens_once() -> None:
    faults = ss.Faults().kill(0, step=3).kill(1, step=5)
    run = ss.launch(job(checkpoint=ss.Checkpoint()), faults=faults).wait(WITHIN_S)
    assert [event["source"] for event in run.events("restart")] == ["start", "start"]
    assert losses(run) == undisturbed(run)
    assert run.restarts == 2
    assert ss.Run.attach(run.path).faults == faults


def test_restarts_are_limited_and_the_error_says_so() -> None:
    faults = ss.Faults.of("kill rank=1 step=2; kill rank=1 step=3")
    run = ss.launch(job(recovery=1), faults=faults)
    with pytest.raises(ss.RunFailed, match="SIGKILL after step 2.*recovery=1 allows no further restart"):
        run.wait(WITHIN_S)
    assert run.state_text == "failed after 1 restart"
    assert run.cause == "killed"


def test_an_error_that_comes_again_ends_the_run_at_once() -> None:
    def loss(output, target):  # type: ignore[no-untyped-def]
        import torch

        loss.calls = getattr(loss, "calls", 0) + 1
        if loss.calls >= 6:
            raise KeyError("no such label")
        return torch.nn.functional.cross_entropy(output, target)

    run = ss.launch(job(loss=loss, recovery=5, checkpoint=ss.Checkpoint()))
    with pytest.raises(ss.RunFailed, match="KeyError: 'no such label'; it failed in the same way before"):
        run.wait(WITHIN_S)
    assert run.restarts == 1


def test_an_error_before_the_first_step_is_not_tried_again() -> None:
    def make_model():  # type: ignore[no-untyped-def]
        raise FileNotFoundError("no weights")

    run = ss.launch(job(model=make_model))
    with pytest.raises(ss.RunFailed, match="no weights; a restart would not help"):
        run.wait(WITHIN_S)
    assert run.restarts == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_met_for_real_and_recovered_from() -> None:
    faults = ss.Faults().fill_disk(1, step=5)
    told = f"{os.strerror(errno.ENOSPC)} while writing checkpoint step-8"
    with pytest.raises(ss.RunFailed, match=told):
        ss.launch(job(recovery=None), faults=faults).wait(WITHIN_S)
    run = ss.launch(job(), faults=faults).wait(WITHIN_S)
    assert losses(run) == undisturbed(run)
    (event,) = run.events("restart")
    assert told in event["cause"]
    assert event["step"] == EVERY


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_saves_leaves_the_earlier_checkpoint(victim: int) -> None:
    run = ss.launch(job(), faults=ss.Faults().kill(victim, step=8, during="checkpoint")).wait(WITHIN_S)
    assert [event["step"] for event in run.events("restart")] == [EVERY]
    assert losses(run) == undisturbed(run)
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step-12", "step-8"]


def test_a_killed_forkserver_is_replaced() -> None:
    run = ss.launch(job(steps=2000, recovery=1, checkpoint=ss.Checkpoint(every=1000)))
    wait_for(lambda: run.summary().last_step >= 3, run)
    agent = psutil.Process(family(run)[0])
    forkserver = next(child for child in agent.children() if len(child.children()) >= 2)
    forkserver.kill()
    assert run.wait(WITHIN_S).restarts == 1
    assert "the forkserver of run" in run.events("restart")[0]["cause"]


def test_it_can_be_stopped_while_it_starts_again() -> None:
    faults = ss.Faults.of("; ".join(f"kill rank=1 step={step}" for step in range(2, 40)))
    run = ss.launch(job(steps=1000, recovery=50), faults=faults)
    wait_for(lambda: run.events("restart"), run)
    processes = family(run)
    run.stop(grace_s=0.5)
    assert run.state == "stopped"
    assert run.restarts >= 1
    assert all_gone(processes)


DRIVER = """
import sys, time
import shardscope as ss
job = ss.Job.from_json(open(sys.argv[1]).read())
run = ss.launch(job, faults="; ".join(f"kill rank=1 step={step}" for step in range(2, 60)))
print(run.path, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_driver_while_it_starts_again(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job(steps=1000, recovery=60).to_json())
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "job.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        run = ss.Run.attach(driver.stdout.readline().strip())
        wait_for(lambda: run.events("restart"), run)
        processes = family(run)
        driver.kill()
    wait_for(lambda: not run.is_alive)
    assert (run.state, run.cause) == ("stopped", "driver-ended")
    assert all_gone(processes)


def test_a_slow_rank_computes_for_longer_in_the_steps_of_the_fault_only() -> None:
    """The factor is so large because it multiplies processor time, and spans also count waiting for a core."""
    run = ss.launch(small_job(steps=STEPS), faults=ss.Faults().slow(1, factor=200, steps=(6, 9))).wait(
        WITHIN_S
    )

    def computing(rank: int, first: int, last: int) -> float:
        rows = [event for event in run.events("step", rank=rank) if first <= event["step"] <= last]
        return min(
            sum(end - begin for lane, name, begin, end, _ in row["spans"] if name in ("forward", "backward"))
            for row in rows
        )

    assert computing(1, 6, 9) > 5 * computing(1, 3, 5)
    assert computing(1, 10, 12) < 5 * computing(1, 3, 5)
    assert computing(0, 6, 9) < 5 * computing(0, 3, 5)
    (event,) = run.events("fault")
    assert (event["step"], event["kind"]) == (6, "slow")
