"""Coverage tests and interval scores: known values, and the width that the score prefers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binom, norm

from published.coverage import ENOUGH, constant_half_width, coverage_p_value
from published.one_step import Known, Z, interval_score
from shardscope.calibration.effects import table_scores


def test_a_table_of_enough_rows_can_be_too_narrow_but_not_too_wide() -> None:
    rejected = [count for count in range(ENOUGH + 1) if coverage_p_value(count, ENOUGH) < 0.05]
    assert rejected == list(range(16))
    assert binom.cdf(15, ENOUGH, 0.7) == pytest.approx(0.76, abs=0.005)
    assert binom.cdf(15, ENOUGH, 0.8) == pytest.approx(0.37, abs=0.005)
    assert coverage_p_value(33, 33) > 0.05 > coverage_p_value(34, 34)


def test_the_interval_score_of_known_intervals() -> None:
    assert interval_score(np.array([0.0, 0.1]), 0.1, 0.2) == pytest.approx(0.3)
    assert interval_score(np.array([0.0, 0.25]), 0.1, 0.2) == pytest.approx(0.3 + 20 * 0.05 / 2)
    assert interval_score(np.array([-0.2]), np.array([0.1]), np.array([0.1])) == pytest.approx(0.2 + 20 * 0.1)


def test_the_interval_score_prefers_intervals_that_contain_90_per_cent() -> None:
    off = norm.ppf((np.arange(2000) + 0.5) / 2000)
    best = min(
        (width for width in np.linspace(0.5, 3.0, 251)), key=lambda width: interval_score(off, width, width)
    )
    assert best == pytest.approx(Z, abs=0.02)


def test_a_constant_width_contains_90_per_cent_of_tables_weighted_equally() -> None:
    assert constant_half_width([np.linspace(-1, 1, 11)]) == pytest.approx(1.0)
    small, large = np.full(98, 0.1), np.array([0.5, 0.9])
    assert constant_half_width([small, large]) == pytest.approx(0.9)
    assert constant_half_width([small] * 9 + [large]) == pytest.approx(0.1)


def test_intervals_are_narrower_after_a_step_and_a_single_row_leaves_none() -> None:
    slope, covariance = np.ones((3, 1)), np.array([[0.04]])
    (turn, *_) = Known(slope, np.array([0.2, 0.2, 0.21]), covariance, 0.02, 0.03).turns()
    assert (turn.high < 1.645 * 0.2).all()
    assert np.abs(turn.off).max() < 0.02
    assert (turn.high > 1.645 * 0.03).all()
    assert Known(slope[:1], np.array([0.2]), covariance, 0.02, 0.03).turns() == []


def test_intervals_after_a_step_allow_for_how_far_the_measured_row_itself_is_off() -> None:
    """Rows deviate by `wide`, though a row moves the factors as if it were by less."""
    random, slope, wide = np.random.default_rng(0), np.ones((4, 1)), 0.1
    known = Known(slope, np.zeros(4), np.array([[0.01]]), 0.05, wide)
    off = 0.1 * random.normal(size=(2000, 1)) + wide * random.normal(size=(2000, 4))
    covered = [turn.covered for each in off for turn in known._replace(off=each).turns()]
    assert np.mean(covered) == pytest.approx(90, abs=1)


@pytest.mark.parametrize("alone", [False, True])
def test_the_other_rows_are_predicted_by_the_constants_that_a_measured_row_makes_likely(alone: bool) -> None:
    slope, off, variance, noise = np.array([[1.0], [2.0]]), np.array([0.3, 0.5]), 0.04, 0.02

    def off_at(x: np.ndarray) -> np.ndarray:
        return off - np.array([np.sinh(x[0]), 2 * x[0]])

    of_row = (lambda row, x: float(off_at(x)[row])) if alone else None
    known = Known(slope, off, np.array([[variance]]), noise, 2 * noise, off_at, of_row)
    (likely,) = minimize_scalar(lambda x: (0.3 - np.sinh(x)) ** 2 / noise**2 + x**2 / variance).x.reshape(1)
    assert known.turns()[0].off == pytest.approx([0.5 - 2 * likely], abs=1e-3)


def test_tables_with_enough_rows_were_tested_without_their_part_in_the_widths() -> None:
    tested = [score for score in table_scores().values() if score["rows"] >= 20]
    assert len(tested) >= 4
    for score in tested:
        assert score["p_value"] == pytest.approx(
            coverage_p_value(round(score["covered"] * score["rows"] / 100), score["rows"]), abs=1e-3
        )
        assert score["interval_score"] > 0
