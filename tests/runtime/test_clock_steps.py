"""Durations of a run do not depend on the system's clock, which may be set back or forward while ranks train."""

from __future__ import annotations

import json
import time

import pytest
from torch import nn

import shardscope as ss
from conformance.runs import acting_module, small_job
from shardscope.runlog import clock


def with_clock_set(by_s: float) -> nn.Module:
    """A model during whose third forward pass the clock of the rank is set, as by NTP."""

    def step() -> None:
        right = time.time
        time.time = lambda: right() + by_s

    return acting_module(step)


@pytest.mark.parametrize("hours", [-1, pytest.param(1, marks=pytest.mark.weekly)])
def test_no_duration_of_a_run_contains_a_step_of_the_clock(hours: int) -> None:
    job = small_job(
        model=lambda: with_clock_set(3600.0 * hours), steps=12, recovery=1, checkpoint=4, eval_every=6
    )
    run = ss.launch(job, faults="kill rank=1 step=7").wait(60)
    summary = run.summary()
    assert run.restarts == 1
    assert summary.wall_s is not None
    assert 0 < summary.wall_s < 60
    assert summary.goodput is not None
    assert 0 < summary.goodput <= 1
    assert all(0 <= event["seconds"] < 60 for event in run.events("checkpoint"))
    took = run.reduced().restarts[0].took_s
    assert took is not None
    assert 0 < took < 60
    times = run.metrics()["t"]
    assert times.is_monotonic_increasing
    assert times.iloc[-1] - times.iloc[0] < 60


def test_the_clock_of_another_process_of_this_boot_is_taken_over() -> None:
    before = clock.offset_text()
    boot, _ = json.loads(before)
    try:
        clock.adopt(json.dumps([boot, 123.0]))
        assert 0 <= clock.now() - 123.0 - time.perf_counter() + 1e-3 < 60
    finally:
        clock.adopt(before)
    assert clock.offset_text() == before


def test_the_clock_of_another_boot_is_not_taken_over() -> None:
    before = clock.offset_text()
    clock.adopt(json.dumps(["another boot", 0.0]))
    clock.adopt(None)
    assert clock.offset_text() == before
