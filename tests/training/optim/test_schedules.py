from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.spec.schedule import SHAPES, Schedule
from shardscope.training.optim import multiplier


def values(schedule, total):
    return [multiplier(schedule, step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule("constant"), [1, 1, 1, 1]),
        (Schedule("constant", warmup_steps=4), [0.25, 0.5, 0.75, 1]),
        (Schedule("linear"), [1, 0.75, 0.5, 0.25]),
        (Schedule("linear", warmup_steps=2, final_ratio=0.5), [0.5, 1, 1, 0.75]),
        (Schedule("polynomial"), [1, 0.75**2, 0.5**2, 0.25**2]),
        (Schedule("polynomial", power=1, final_ratio=0.2), [1, 0.8, 0.6, 0.4]),
        (Schedule("cosine"), [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        (Schedule("exponential", final_ratio=1 / 16), [1, 1 / 2, 1 / 4, 1 / 8]),
        (Schedule("exponential", final_ratio=16), [1, 2, 4, 8]),
        (Schedule("exponential", warmup_steps=2, final_ratio=1 / 4), [1 / 2, 1, 1, 1 / 2]),
        (Schedule("sqrt"), [1, 1 / math.sqrt(2), 1 / math.sqrt(3), 0.5]),
        (Schedule("sqrt", warmup_steps=2), [0.5, 1, math.sqrt(2 / 3), math.sqrt(0.5)]),
    ],
    ids=str,
)
def test_values(schedule, expected):
    assert values(schedule, 4) == pytest.approx(expected, abs=1e-15)


@given(
    name=st.sampled_from(sorted(SHAPES)),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
)
def test_rises_to_full_rate_then_never_rises_again(name, warmup, total):
    rates = values(Schedule(name, warmup_steps=min(warmup, total)), total)
    peak = max(warmup, 1) - 1
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


@pytest.mark.parametrize("name", ["linear", "polynomial", "cosine"])
def test_stays_at_the_final_ratio_past_the_end(name):
    schedule = Schedule(name, final_ratio=0.1)
    assert [multiplier(schedule, step, 10) for step in (11, 50)] == pytest.approx([0.1, 0.1])
