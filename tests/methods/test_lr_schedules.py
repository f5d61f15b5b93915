"""The built-in learning-rate schedules."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope import LRSchedule
from shardscope.conformance import LRScheduleConformance
from shardscope.errors import SpecError
from shardscope.spec.registry import names, require_known


def factors(schedule: LRSchedule, steps: int) -> list[float]:
    return [schedule.factor(step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LRSchedule("constant"), [1, 1, 1, 1]),
        (LRSchedule("constant", warmup_steps=4), [0.25, 0.5, 0.75, 1]),
        (LRSchedule("linear"), [1, 0.75, 0.5, 0.25]),
        (LRSchedule("linear", warmup_steps=2, final_ratio=0.5), [0.5, 1, 1, 0.75]),
        (LRSchedule("polynomial"), [1, 0.75**2, 0.5**2, 0.25**2]),
        (LRSchedule("polynomial", power=1, final_ratio=0.2), [1, 0.8, 0.6, 0.4]),
        (LRSchedule("cosine"), [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        (LRSchedule("exponential", final_ratio=1 / 16), [1, 1 / 2, 1 / 4, 1 / 8]),
        (LRSchedule("exponential", final_ratio=16), [1, 2, 4, 8]),
        (LRSchedule("exponential", warmup_steps=2, final_ratio=1 / 4), [1 / 2, 1, 1, 1 / 2]),
        (LRSchedule("sqrt"), [1, 1 / math.sqrt(2), 1 / math.sqrt(3), 0.5]),
        (LRSchedule("sqrt", warmup_steps=2), [0.5, 1, math.sqrt(2 / 3), math.sqrt(0.5)]),
    ],
    ids=repr,
)
def test_values(schedule: LRSchedule, expected: list[float]) -> None:
    assert factors(schedule, 4) == pytest.approx(expected, abs=1e-15)


@given(name=st.sampled_from(sorted(names(LRSchedule))), warmup=st.integers(0, 50), steps=st.integers(1, 200))
def test_rises_to_full_rate_then_never_rises_again(name: str, warmup: int, steps: int) -> None:
    rates = factors(LRSchedule(name, warmup_steps=min(warmup, steps)), steps)
    peak = max(warmup, 1) - 1
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


@pytest.mark.parametrize("name", ["linear", "polynomial", "cosine"])
def test_stays_at_the_final_ratio_past_the_end(name: str) -> None:
    schedule = LRSchedule(name, final_ratio=0.1)
    assert [schedule.factor(step, 10) for step in (11, 50)] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("cosine", {"power": 3}, r"lr_schedule.power=3 has no effect on cosine; .* polynomial"),
        ("sqrt", {"final_ratio": 0.1}, "final_ratio=0.1 has no effect on sqrt; .* exponential or linear"),
        ("sqrt", {"pwoer": 2}, "sqrt setting='pwoer' is not known; valid names are warmup_steps"),
        ("cosin", {}, "lr_schedule='cosin' is not known; did you mean 'cosine'"),
        ("cosine", {"final_ratio": 2}, "lr_schedule.final_ratio=2 is not valid: it should be less than or equal to 1"),
        ("exponential", {"final_ratio": 0}, "lr_schedule.final_ratio=0 is not valid: it should be greater than 0"),
        (7, {}, "lr_schedule=7 is not known"),
    ],
)  # fmt: skip
def test_refuses_what_would_have_no_effect_or_is_out_of_range(name: str, settings: dict, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        LRSchedule(name, **settings)


@pytest.mark.parametrize("name", ["constant", "linear", "sqrt", "polynomial", "cosine", "exponential"])
def test_none_leaves_a_setting_at_its_default(name: str) -> None:
    asked = {"warmup_steps": None, "power": None, "final_ratio": None}
    assert LRSchedule(name, **asked) == LRSchedule(name)


def test_exponential_may_rise() -> None:
    assert LRSchedule("exponential", final_ratio=1e6).settings["final_ratio"] == 1e6


class TestCosine(LRScheduleConformance):
    method = require_known(LRSchedule, "cosine")


class TestSqrt(LRScheduleConformance):
    method = require_known(LRSchedule, "sqrt")
