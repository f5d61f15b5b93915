"""Goodput predicted from the costs of an earlier run, against real runs that are killed and against simulated ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.analytic.failing_runs import (
    FailingRun,
    duration_s,
    duration_with_progress_s,
    simulated_s,
)
from shardscope.analytic.reliability import expected
from shardscope.measure.goodput import costs_of

RUN = FailingRun(work_s=10, interval_s=4, save_s=0.5, restart_s=1)


@pytest.mark.parametrize(
    ("failures_s", "took_s"),
    [
        ([], 11.0),  # two checkpoints
        ([3.0], 15.0),  # nothing was saved
        ([4.4], 16.4),  # while it saves
        ([5.0], 12.5),
        ([5.5, 5.0], 13.0),  # again while it restarts
        ([9.5], 12.5),
        ([11.0, 20.0], 11.0),  # after the end
    ],
)
def test_a_run_repeats_what_was_not_saved(failures_s: list[float], took_s: float) -> None:
    assert duration_s(failures_s, RUN) == pytest.approx(took_s)


def test_kills_before_a_step_come_after_its_predecessors_checkpoint() -> None:
    assert duration_with_progress_s([4.0], RUN) == pytest.approx(4.5 + 1 + 6 + 0.5)
    assert duration_with_progress_s([5.0, 5.0], RUN) == pytest.approx(5.5 + 1 + 1 + 1 + 6 + 0.5)
    late = FailingRun(work_s=10, interval_s=4, save_s=0.5, restart_s=1, write_s=2)
    assert duration_with_progress_s([5.0], late) == pytest.approx(5.5 + 1 + 11)


def test_without_checkpoints_a_failure_costs_all() -> None:
    assert duration_s([9.0], FailingRun(work_s=10, interval_s=np.inf, save_s=0, restart_s=1)) == 20


@pytest.mark.parametrize("write_s", [0.0, 1.5])
def test_long_runs_have_the_goodput_of_endless_ones(write_s: float) -> None:
    run = FailingRun(work_s=5000, interval_s=4, save_s=0.5, restart_s=1, write_s=write_s)
    found = run.work_s / simulated_s(run, mtbf_s=8, runs=200).mean()
    said = expected(mtbf_s=8, save_s=0.5, restart_s=1, interval_s=4, write_s=write_s)
    assert found == pytest.approx(float(said.goodput), rel=0.01)


def test_short_runs_lose_less_on_average_but_vary() -> None:
    run = FailingRun(work_s=16, interval_s=4, save_s=0.5, restart_s=1)
    goodputs = run.work_s / simulated_s(run, mtbf_s=40, runs=4000)
    assert goodputs.max() == pytest.approx(16 / 18)  # no failure at all
    assert goodputs.std() > 0.05
    assert np.array_equal(goodputs, run.work_s / simulated_s(run, mtbf_s=40, runs=4000))


def test_a_failure_rate_at_which_no_run_ends_is_refused() -> None:
    run = FailingRun(work_s=100, interval_s=50, save_s=0, restart_s=1)
    told = r"mtbf_s=0.5 is so short that the run would need more than 100,000 failures to finish"
    with pytest.raises(ss.SpecError, match=told):
        simulated_s(run, mtbf_s=0.5)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> ss.Run:
    """A run with a kill before a step, one at a time, and checkpoints."""
    job = small_job(steps=40, checkpoint=5, recovery=4)
    faults = ss.Faults().kill(0, step=13).kill(1, step=29)
    return ss.launch(job, faults=faults, root=tmp_path_factory.mktemp("runs")).wait(90)


@pytest.mark.timeout(120)
def test_the_costs_of_a_run_explain_its_own_goodput(killed: ss.Run) -> None:
    summary = killed.summary()
    found = ss.goodput(killed, faults=killed.faults)
    assert found.mean == pytest.approx(summary.goodput, rel=0.15)
    assert found.costs.every == 5
    assert (found.costs.num_saves, found.costs.num_restarts) == (5, 2)  # without those next to a restart
    restarts = killed.reduced().restarts
    assert all(each.took_s is not None for each in restarts)
    until_first_step = [(each.took_s or 0.0) - each.first_steps_s[0] for each in restarts]
    assert found.costs.restart_s >= np.mean(until_first_step)
    assert repr(found).startswith("goodput ")


def test_more_failures_and_rarer_checkpoints_cost_more(killed: ss.Run) -> None:
    smooth = ss.goodput(killed, faults=ss.Faults(), steps=1000, every=1000)
    usual = ss.goodput(killed, mtbf_s=smooth.durations_s[0] / 2, steps=1000)
    often = ss.goodput(killed, mtbf_s=smooth.durations_s[0] / 8, steps=1000)
    assert often.mean < usual.mean
    assert usual.interval.low <= usual.mean <= usual.interval.high
    assert usual.endless is not None
    assert "90 % of runs) with a failure every " in repr(usual)
    assert repr(usual).endswith("; costs from 5 saves and 2 restarts")
    rare = ss.goodput(killed, mtbf_s="6 h")
    assert (
        f"({rare.interval.low:.1%} to {rare.interval.high:.1%} in 90 % of runs) with a failure every 6 h"
        in repr(rare)
    )
    rarely = ss.goodput(killed, faults="kill rank=0 step=900; kill rank=1 step=900", steps=1000, every=1000)
    costs = smooth.costs
    repeated_s = 899 * (costs.step_s + costs.between_s)
    assert rarely.durations_s[0] - smooth.durations_s[0] == pytest.approx(
        repeated_s + costs.restart_s, rel=0.02
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "needs either mtbf_s"),
        ({"mtbf_s": 5, "faults": "kill rank=0 step=3"}, "needs either mtbf_s"),
        ({"mtbf_s": 5, "steps": 0}, "steps=0 is not valid"),
        (
            {"faults": "kill rank=0 step=3; kill rank=1 at=2s"},
            "kills at steps and kills at times; give one kind",
        ),
        ({"faults": "slow rank=0 factor=3"}, "goodput can only predict kills"),
        ({"faults": "kill rank=7 step=4"}, "kill names rank 7, but the job's ranks are 0 to 1"),
        ({"faults": "kill rank=0 step=400"}, "kill names step 400, but the job ends after step 40"),
        ({"faults": "kill rank=0 step=60", "steps": 50}, "the job ends after step 50"),
    ],
)
def test_what_cannot_be_predicted_is_refused(killed: ss.Run, arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ss.SpecError, match=told):
        ss.goodput(killed, **arguments)  # type: ignore[arg-type]


def test_a_run_without_restarts_has_no_costs_to_predict_from(tmp_path: Path) -> None:
    run = ss.launch(small_job(), root=tmp_path).wait(60)
    with pytest.raises(
        ss.errors.RunUnreadable, match="has 0 checkpoints between steps and 0 restarts; give a run"
    ):
        ss.goodput(run, mtbf_s=5)


@pytest.mark.slow
def test_steps_that_a_fault_slows_down_are_no_usual_steps(tmp_path: Path) -> None:
    cluster = ss.Cluster.emulated(
        1, per_node=2, flops=1.2e8
    )  # ranks sleep, so load hardly changes step times
    job = small_job(steps=20, checkpoint=4, recovery=1)
    faults = ss.Faults().kill(0, step=11).slow(1, factor=6, steps=(14, 15))
    run = ss.launch(job, cluster, faults=faults, root=tmp_path).wait(90)
    steps = {step.number: step.step_time_s for step in run.reduced().steps}
    usual_s = np.median([seconds for number, seconds in steps.items() if not faults.slows(number)])
    assert np.median([seconds for number, seconds in steps.items() if faults.slows(number)]) > 2 * usual_s
    assert costs_of(run).step_s == pytest.approx(usual_s, rel=0.3)


def test_a_run_that_saves_after_every_step_does_not_tell_what_a_save_takes(tmp_path: Path) -> None:
    job = small_job(steps=16, recovery=ss.Recovery(1, replica_every=1))
    run = ss.launch(job, faults=ss.Faults().kill(0, step=9), root=tmp_path).wait(60)
    with pytest.raises(
        ss.errors.RunUnreadable, match=r"after every step, so the time of a save is unknown; give"
    ):
        ss.goodput(run, mtbf_s=5)
