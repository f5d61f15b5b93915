"""Figures per step where steps are alike, and where only every so many talk to the other ranks."""

from __future__ import annotations

from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from conformance.events import step_event
from conformance.runs import small_job
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.steps import StepKinds, per_step


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20))
def test_steps_that_are_alike_give_their_own_average_without_the_first_two(values: list[float]) -> None:
    steps = range(1, len(values) + 1)
    assert per_step(steps, values) == pytest.approx(fmean(values[2:] or values), rel=1e-14)
    assert per_step(steps, values, average="median") == median(values[2:] or values)


@given(st.integers(2, 12), st.integers(2, 6), st.data())
def test_whichever_steps_were_written_the_two_sorts_count_as_often_as_they_come(
    period: int, periods: int, data: st.DataObject
) -> None:
    steps = range(1, period * periods + 1)
    shown = data.draw(st.sets(st.sampled_from(steps))) | {period * periods, period * periods - 1}
    values = [7.0 if step % period == 0 else 1.0 for step in sorted(shown)]
    assert per_step(sorted(shown), values, StepKinds(period)) == pytest.approx((7 + period - 1) / period)


@pytest.mark.parametrize(("steps", "period"), [((), 1), ((1, 2, 3), 4), ((4, 8), 4)])
def test_what_was_not_seen_is_not_made_up(steps: tuple[int, ...], period: int) -> None:
    assert per_step(steps, [1.0] * len(steps), StepKinds(period)) is None


def test_a_run_under_local_sgd_sends_its_average_once_in_a_period() -> None:
    job = small_job(compression=ss.Compression("local-sgd", every=4), steps=11)
    summary = ss.launch(job).wait(60).summary()
    assert summary.uncompressed_bytes_per_step is not None
    assert summary.bytes_per_step == summary.uncompressed_bytes_per_step / 4
    assert summary.bytes_ratio == 4
    assert summary.codec_s_per_step == 0
    assert summary.step_time_s is not None
    assert summary.step_time_s > 0


def test_a_wait_for_a_slow_rank_that_meets_the_others_every_three_steps_counts_once() -> None:
    """Rank 1 takes 0.4 s a step and rank 0 takes 0.2 s, and then waits for it in every third step."""
    log = RunLog(world_size=2, kinds=StepKinds(period=3))
    for step in range(1, 13):
        period, place = divmod(step - 1, 3)
        fast = 0.2 if place < 2 else 0.8
        log.feed(
            [
                step_event(
                    step, 0, t=10 + 1.2 * period + (0.2 * (place + 1) if place < 2 else 1.2), step_time_s=fast
                )
            ]
        )
        log.feed([step_event(step, 1, t=10 + 0.4 * step, step_time_s=0.4)])
    assert log.step_time_s == pytest.approx(0.4)
    assert log.steps.column("step_time_s")[1:].tolist() == pytest.approx([0.4] * 11)
