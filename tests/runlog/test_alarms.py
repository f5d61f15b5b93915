"""The rules of alarms, each on both sides of its threshold."""

from __future__ import annotations

import math

import pytest

from shardscope.runlog import alarms
from shardscope.runlog.layers import RatioSeries, ResidualSeries
from shardscope.spec import Optimizer


def ratios(values, layer="w", bounds=None, weights=None, lr=1e-3) -> RatioSeries:
    """A series looked at in steps 1, 2, ..."""
    count = len(values)
    weights = weights or [2.0] * count
    rates = tuple(lr) if isinstance(lr, tuple | list) else (lr,) * count
    return RatioSeries(
        layer, tuple(range(1, count + 1)), rates, tuple(values), tuple(weights), (1.0,) * count,
        tuple(bounds or [None] * count),
    )  # fmt: skip


def residuals(values, layer="w", gradient=1.0, kind="residual") -> ResidualSeries:
    count = len(values)
    return ResidualSeries(layer, kind, tuple(range(1, count + 1)), tuple(values), (gradient,) * count)


def all_of(*series, optimizer="lamb"):
    told = [one for one in series if isinstance(one, RatioSeries)]
    return alarms.alarms_of(
        Optimizer(optimizer), told, [one for one in series if isinstance(one, ResidualSeries)]
    )


def test_healthy_series_raise_none_and_neither_do_short_ones():
    assert all_of(ratios([0.1 + 0.01 * i for i in range(40)]), residuals([1.0] * 40)) == ()
    assert all_of() == ()
    assert all_of(ratios([0.1] * 3, bounds=["clamp"] * 3), residuals([50.0] * 3)) == ()
    assert all_of(ratios([1e-9, 1e-9, 1e-9, 1.0, 1.0, 1.0, 1.0])) == ()


@pytest.mark.parametrize("grows", [True, False])
def test_ratios_that_drift(grows: bool):
    def series(factor):
        values = [1.0] * 4 + [factor] * 4
        return ratios(values if grows else [1 / value for value in values])

    assert all_of(series(99.0)) == ()
    [alarm] = all_of(ratios([1.0] * 8, layer="steady"), series(101.0))
    assert alarm.kind == ("exploding" if grows else "vanishing")
    assert alarm.layers == ("w",)
    assert alarm.value == pytest.approx(101)
    assert "the trust ratio of w went from 1 to " in str(alarm)
    # steps from weights of zero have no ratio of their own
    from_zero = ratios([1.0, *[1e-3] * 8], weights=[0.0, *[1.0] * 8])
    assert all_of(from_zero) == ()


@pytest.mark.parametrize(
    ("optimizer", "bound", "out"),
    [
        ("lamb", "clamp", "raise optimizer.clamp"),
        ("lamb", "trust_clip", "trust_clip=False"),
        ("lars", "trust_clip", "plain SGD steps"),
        ("lamb", "factor", "warmup_steps"),
    ],
)
def test_ratios_that_a_bound_holds(optimizer: str, bound: str, out: str):
    half = ratios([0.5] * 8, bounds=[bound] * 4 + [None] * 4)
    most = ratios([0.5] * 8, bounds=[bound] * 5 + [None] * 3)
    assert all_of(half, optimizer=optimizer) == ()
    [alarm] = all_of(half, most, ratios([0.5] * 8, "v", [bound] * 8), optimizer=optimizer)
    assert alarm.layers == ("v", "w")
    assert alarm.value == 1.0
    assert "v (and 1 more) is limited by" in alarm.text
    assert out in alarm.text


@pytest.mark.parametrize(("optimizer", "usual"), [("lamb", 1e-3), ("lars", 0.1)])
def test_layers_of_zeros_that_step_bare(optimizer: str, usual: float):
    def first(lr):
        return ratios([1.0, 0.5], weights=[0.0, 1.0], lr=(lr, 1.0))

    assert all_of(first(10 * usual), optimizer=optimizer) == ()
    [alarm] = all_of(first(10.1 * usual), optimizer=optimizer)
    assert alarm.kind == "bare step"
    assert "the weights of w are all 0 at step 1" in alarm.text
    unmoved = RatioSeries("w", (1,), (9.0,), (1.0,), (0.0,), (0.0,), (None,))
    assert all_of(unmoved, optimizer=optimizer) == ()


def test_optimizers_that_adapt_nothing():
    bare = ratios([None] * 3, weights=[None] * 3)
    assert all_of(bare, ratios([0.5] * 3, "v")) == ()
    [alarm] = all_of(bare)
    assert alarm.kind == "not adapted"
    assert "has a trust ratio, so lamb takes plain Adam steps at lr=0.001" in alarm.text
    assert "plain SGD steps" in all_of(bare, optimizer="lars")[0].text


def test_what_is_owed_late():
    assert all_of(residuals([9.9] * 8)) == ()
    [alarm] = all_of(residuals([10.1] * 8), residuals([5.0] * 8, "v"))
    assert (alarm.kind, alarm.layers, alarm.value) == ("late", ("w",), pytest.approx(10.1))
    assert "the residual of w (kind 'residual') has 10.1 times the norm of one step's gradient" in alarm.text
    # a layer with little of the gradient may wait for its turn
    assert all_of(residuals([9.9] * 8), residuals([50 * 0.09] * 8, "bias", gradient=0.09)) == ()
    assert kinds(residuals([9.9] * 8), residuals([50 * 0.11] * 8, "bias", gradient=0.11)) == ["late"]


def kinds(*series):
    return [alarm.kind for alarm in all_of(*series)]


def test_what_piles_up():
    def quarters(*values):
        return residuals([value for value in values for _ in range(2)])

    assert kinds(quarters(1, 2, 3, 3.9)) == []
    assert kinds(quarters(1, 2, 3, 4.1)) == ["piling up"]
    assert kinds(quarters(1, 2, 1.9, 4.1)) == []  # it fell in between
    assert kinds(quarters(0.1, 0.2, 0.3, 0.9)) == []  # less than one gradient
    assert kinds(quarters(1, 0, 3, 4.1)) == ["piling up"]


def test_what_is_no_number_comes_first():
    broken = ratios([0.5, math.nan, 0.5], layer="v")
    [alarm] = all_of(ratios([0.5] * 3), broken)
    assert (alarm.kind, alarm.layers) == ("not finite", ("v",))
    assert "the trust ratio of v is nan at step 2" in alarm.text
    assert kinds(residuals([1.0, math.inf])) == ["not finite"]
    assert kinds(broken, *[ratios([0.1] * 8, bounds=["clamp"] * 8)]) == ["not finite", "pinned"]
