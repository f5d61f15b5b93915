"""The slowest of many ranks: known order statistics, and the jitter of measured times."""

from __future__ import annotations

import numpy as np
import pytest

from shardscope.analytic.stragglers import Jitter, expected_slowest, jitter_of
from shardscope.errors import SpecError

NORMAL_MAXIMA = {1: 0.0, 2: 0.5641895835, 3: 0.8462843753, 5: 1.1629644736, 10: 1.5387527308, 100: 2.5075936}
"""Expected maxima of standard normal variables: David and Nagaraja, Order Statistics, table 3.2, and Harter 1961."""


def test_expected_maxima_are_those_of_the_tables() -> None:
    found = expected_slowest(10.0, 1.0, list(NORMAL_MAXIMA), distribution="normal") - 10.0
    assert found == pytest.approx(list(NORMAL_MAXIMA.values()), abs=1e-7)


def test_order_statistics_of_any_rank_add_up_to_the_mean() -> None:
    """The mean over all order statistics of a sample is that of the distribution."""
    for distribution in ("normal", "lognormal"):
        found = expected_slowest(3.0, 1.2, 7, dropped=np.arange(7), distribution=distribution)
        assert found.mean() == pytest.approx(3.0, rel=1e-7)
        assert (np.diff(found) < 0).all()


def test_the_asymptotic_bound_is_an_upper_one_and_close() -> None:
    ranks = np.array([8, 64, 4096, 2**20])
    exact = expected_slowest(1.0, 0.05, ranks, distribution="normal")
    bound = 1.0 + 0.05 * np.sqrt(2 * np.log(ranks))  # David and Nagaraja, sections 4.2 and 10.5
    assert (exact < bound).all()
    assert (bound - 1)[-1] / (exact - 1)[-1] < 1.1


def test_the_expected_maximum_is_that_of_random_times() -> None:
    rng, sigma = np.random.default_rng(1), np.sqrt(np.log1p(0.3**2))
    drawn = np.exp(sigma * rng.standard_normal((20000, 64)) - sigma**2 / 2)
    assert drawn.max(axis=1).mean() == pytest.approx(float(expected_slowest(1.0, 0.3, 64)), rel=0.01)
    second = np.sort(drawn, axis=1)[:, -2].mean()
    assert second == pytest.approx(float(expected_slowest(1.0, 0.3, 64, dropped=1)), rel=0.01)


def test_meeting_less_often_averages_jitter_out() -> None:
    rng = np.random.default_rng(2)
    drawn = rng.normal(1.0, 0.1, (20000, 8, 16)).mean(axis=2).max(axis=1).mean()
    assert drawn == pytest.approx(
        float(expected_slowest(1.0, 0.1, 8, every=16, distribution="normal")), rel=1e-3
    )


def test_jitter_of_eight_ranks_predicts_that_of_thousands() -> None:
    """The parts between ranks and within them are found again, and give the maximum of far more ranks."""
    rng = np.random.default_rng(3)

    def times(ranks: int, steps: int) -> np.ndarray:
        own = np.exp(0.05 * rng.standard_normal(ranks))
        return 0.1 * own * np.exp(0.03 * rng.standard_normal((steps, ranks)))

    found = [jitter_of(times(8, 200)) for _ in range(40)]
    assert np.mean([each.between**2 for each in found]) == pytest.approx(0.05**2, rel=0.2)
    assert np.mean([each.within for each in found]) == pytest.approx(0.03, rel=0.02)
    exact = Jitter(0.1 * np.exp((0.05**2 + 0.03**2) / 2), 0.05, 0.03, 8, 200)
    measured = np.mean([times(4096, 20).max(axis=1).mean() for _ in range(5)])
    assert float(exact.slowest_s(4096)) == pytest.approx(measured, rel=0.02)
    assert float(exact.slowest_s(4096, every=10)) < float(exact.slowest_s(4096))


def test_steps_that_are_slow_on_all_ranks_make_no_rank_wait() -> None:
    rng = np.random.default_rng(4)
    common = np.exp(0.2 * rng.standard_normal((100, 1)))
    equal = jitter_of(common * np.ones(8))
    assert equal.slowdown([8, 4096]) == pytest.approx([1.0, 1.0])
    found = jitter_of(common * np.exp(0.03 * rng.standard_normal((100, 8))))
    assert found.within == pytest.approx(0.03, rel=0.1)
    assert found.between < 0.01


def test_the_expected_maximum_of_a_billion_ranks_is_exact() -> None:
    """From a quadrature with 30 digits."""
    found = expected_slowest(10.0, 1.0, [2.0**20, 2.0**30], distribution="normal") - 10.0
    assert found == pytest.approx([4.8722939725009, 6.0990799421933], abs=1e-12)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(SpecError, match="give 1 to 2..30 ranks, and drop fewer than all"):
        expected_slowest(1.0, 0.1, 4, dropped=4)
    with pytest.raises(SpecError, match="ranks=0 with dropped=0 is not valid"):
        expected_slowest(1.0, 0.1, [4, 0])
    with pytest.raises(SpecError, match="give at least 2 steps and 2 ranks"):
        jitter_of([[1.0, 2.0]])
    with pytest.raises(SpecError, match="give times above 0"):
        jitter_of([[1.0, 2.0], [0.0, 1.0]])
