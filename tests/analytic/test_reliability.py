"""Goodput and checkpoint intervals, against a simulation of failing jobs and against what operators published."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardscope as ss
from shardscope.errors import SpecError

found = ss.analytic.reliability
HOUR = 3600.0


def simulated(*, mtbf_s: float, save_s: float, restart_s: float, interval_s: float, write_s: float) -> float:
    """Goodput of one long job that fails at random: an event loop that knows nothing of the formula."""
    dice = np.random.default_rng(7)
    now = useful = 0.0
    failure = dice.exponential(mtbf_s)
    failures = 0
    while failures < 20_000:
        done = 0  # intervals whose checkpoint is complete, since the last restart
        began = now
        while began + (done + 1) * (interval_s + save_s) + write_s < failure:
            done += 1
        useful += done * interval_s
        now, failures = failure, failures + 1
        while (failure := now + dice.exponential(mtbf_s)) < now + restart_s:  # fails again in the restart
            now, failures = failure, failures + 1
        now += restart_s
    return useful / now


@pytest.mark.parametrize(
    "case",
    [
        {"mtbf_s": 3 * HOUR, "save_s": 60.0, "restart_s": 600.0, "interval_s": 900.0, "write_s": 0.0},
        {"mtbf_s": 3 * HOUR, "save_s": 2.0, "restart_s": 300.0, "interval_s": 300.0, "write_s": 250.0},
        {"mtbf_s": 100.0, "save_s": 5.0, "restart_s": 40.0, "interval_s": 60.0, "write_s": 10.0},
        {"mtbf_s": 10.0, "save_s": 0.0, "restart_s": 0.0, "interval_s": 1.0, "write_s": 0.0},
    ],
)
def test_goodput_is_that_of_simulated_jobs(case: dict[str, float]) -> None:
    said = found.expected(**case)
    assert float(said.goodput) == pytest.approx(simulated(**case), rel=0.015)
    total = 1 + said.saving_share + said.lost_share + said.restart_share
    assert float(said.goodput) == pytest.approx(1 / float(total), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(mtbf_s=st.floats(60, 1e7), ratio=st.floats(1e-5, 0.5), restart_s=st.floats(0, 100))
def test_dalys_interval_is_the_best_to_a_thousandth_of_the_goodput(
    mtbf_s: float, ratio: float, restart_s: float
) -> None:
    times = {"mtbf_s": mtbf_s, "save_s": ratio * mtbf_s, "restart_s": restart_s}
    best = found.expected(**times)
    others = found.expected(**times, interval_s=best.interval_s * np.geomspace(0.05, 20, 2001))
    assert best.goodput >= (1 - 1e-3) * others.goodput.max()
    young = found.young_interval_s(save_s=times["save_s"], mtbf_s=mtbf_s)
    if ratio < 1e-3:
        assert float(best.interval_s) == pytest.approx(float(young), rel=0.03)


def test_checkpoints_that_cost_more_than_two_failures_are_saved_once_in_the_mean_time_between_them() -> None:
    assert float(found.daly_interval_s(save_s=500, mtbf_s=100)) == 100


def test_failure_rates_of_meta_follow_from_that_of_one_node() -> None:
    """Kokolis et al. 2024 (arXiv 2410.21680): 6.50 failures in 1000 node-days, so 1.8 h for 16,384 and 0.23 h for
    131,072 GPUs in nodes of 8."""
    device = 8 * 86400 * 1000 / 6.5
    hours = found.job_mtbf_s(device, devices=[16384, 131072]) / HOUR
    np.testing.assert_allclose(hours, [1.8, 0.23], rtol=0.025)


def test_llama_3_spent_more_than_nine_tenths_of_its_time_on_training() -> None:
    """419 unexpected interruptions in 54 days are one in 3.1 hours; more than 90 % of the time was effective.

    That needs restarts within 13 minutes or so, with checkpoints that delay training by seconds.
    """
    mtbf = found.job_mtbf_s(found.LLAMA_3_DEVICE_MTBF_S, devices=16384)
    said = found.expected(mtbf_s=mtbf, save_s=5, restart_s=[300, 600, 900, 1800])
    assert 54 * said.failures_per_day == pytest.approx(419)
    assert (said.goodput > 0.9).tolist() == [True, True, False, False]
    assert (np.diff(said.goodput) < 0).all()


def test_what_is_not_a_time_is_named() -> None:
    with pytest.raises(SpecError, match=r"mtbf_s=0 must be above 0"):
        found.expected(mtbf_s=0, save_s=1)
    with pytest.raises(SpecError, match=r"restart_s=-1 must be 0 or more"):
        found.expected(mtbf_s=10, save_s=1, restart_s=-1)
    with pytest.raises(SpecError, match=r"devices=0 must be above 0"):
        found.job_mtbf_s(1e6, devices=0)


@pytest.mark.filterwarnings("error")
def test_a_job_that_never_completes_a_checkpoint_does_nothing_useful() -> None:
    for restart_s, share in ((0, 0.0), (5, np.inf)):
        never = found.expected(mtbf_s=1e-3, save_s=10, interval_s=100, restart_s=restart_s)
        assert (never.goodput, never.lost_share, never.restart_share) == (0.0, np.inf, share)
        assert all(isinstance(each, np.ndarray) for each in never)
