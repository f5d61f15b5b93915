"""Scores of each table by effects fitted without it, with intervals whose widths the other tables choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from published.all_tables import Table
from published.coverage import ENOUGH, constant_half_width, coverage_p_value
from published.effects_fit import Found, Spreads, estimated, noise_index
from published.formulas import constant_mfu_seconds, plain_seconds
from published.one_step import LEVEL, Ends, Known, Z, ends_of, inside, interval_score

Floats = npt.NDArray[np.float64]
Widths = tuple[float, float]
WIDER, NOISIER = (0.5, 0.7, 1.0, 1.4, 2.0), (1.0, 1.3, 1.7, 2.0, 2.4, 2.8)
"""Factors that are tried: of the covariance of a new table's constants, and of the standard deviation of its rows in
intervals. The formulas are not exact, so tables differ more than the likelihood of linear effects says."""
REJECTED = 0.05


class LeftOut(NamedTuple):
    """What the other tables say about a table."""

    slope: Floats
    off: Floats
    covariance: Floats
    noise: float
    table: Table
    at: Floats
    """Expected values of the table's factors."""
    place: int | None
    """The table's place among those that were fitted; None if it is not one of them."""

    def before(self, widths: Widths) -> Ends:
        """Return the table's intervals without a measured step."""
        wider, noisier = widths
        within = Z * noisier * self.noise
        return ends_of(self.slope, self.off, wider * self.covariance, within, within)

    def after(self, widths: Widths, *, is_exact: bool = False) -> list[Ends]:
        """Return the other rows' intervals after each row was measured; linear predictions take less time."""
        wider, noisier = widths
        off_at = (lambda step: self.table.off(self.at + step)) if is_exact else None
        known = Known(self.slope, self.off, wider * self.covariance, self.noise, noisier * self.noise, off_at)
        return known.turns()


def left_out(t: Table, place: int | None, seen: Found, x: Floats) -> LeftOut:
    """Predict a table by effects that the others make likely.

    Args:
        t: The table.
        place: Its place among the fitted tables; None if it is not one of them.
        seen: What the rows of all fitted tables say.
        x: The standard deviations to start from.
    """
    rest = seen.seen if place is None else seen.seen.without(place)
    found = Found.of(rest, Spreads.of(estimated(rest, x)))
    effects = {**t.shared, "table new": 1.0}
    at, noise = found.mean(effects), float(found.spreads.noise[noise_index(effects)])
    off, slope = t.linear(at)
    return LeftOut(slope, off, found.covariance(effects), noise, t, at, place)


class Trial(NamedTuple):
    """A table's intervals with some widths."""

    score: float
    """Sum of the mean interval scores before and after one measured step."""
    excess: float
    """How many of its intervals, those before and those after one measured step, a binomial test says contain less than
    90 % of measured times, less the number that would be by chance."""

    @classmethod
    def of(cls, one: LeftOut, widths: Widths) -> Trial:
        """Try some widths."""
        before, turns, rows = one.before(widths), one.after(widths), len(one.off)
        score = before.score + float(np.mean([turn.score for turn in turns]))
        shares = before.covered, float(np.mean([turn.covered for turn in turns]))
        rejected = sum(is_rejected(round(share / 100 * rows), rows) for share in shares)
        return cls(score, rejected - len(shares) * rejected_by_chance(rows))


def is_rejected(inside: int, rows: int) -> bool:
    """Return whether intervals of 90 % contain so few of the rows that a binomial test rejects them."""
    return inside < LEVEL * rows and coverage_p_value(inside, rows) < REJECTED


def rejected_by_chance(rows: int) -> float:
    """Probability that intervals which contain 90 % of rows are rejected, less than `REJECTED` as counts are whole."""
    return float(sum(binom.pmf(k, rows, LEVEL) for k in range(rows) if is_rejected(k, rows)))


Trials = Mapping[Widths, Sequence[Trial]]


def trials(found: Sequence[LeftOut]) -> Trials:
    """Try all widths on all fitted tables."""
    fitted = [one for one in found if one.place is not None]
    return {widths: [Trial.of(one, widths) for one in fitted] for widths in product(WIDER, NOISIER)}


def best_widths(tried: Trials, place: int | None = None) -> Widths:
    """Return the factors with the least interval score on all tables but one.

    They are chosen from those with which no more intervals are rejected than would be by chance.
    """

    def loss(widths: Widths) -> tuple[float, float]:
        others = [each for other, each in enumerate(tried[widths]) if other != place]
        excess = sum(each.excess for each in others)
        return max(0.0, excess), float(np.mean([each.score for each in others]))

    return min(tried, key=loss)


def scores(found: Sequence[LeftOut]) -> dict[str, dict[str, float]]:
    """Return the scores of all tables, each with the widths that the others choose; errors in per cent.

    ============================ ======================================================================================
    left_out                     MAPE without any measured step of the table
    after                        MAPE of the other rows after one row was measured: the median over which one
    covered                      share of measured times inside the 90 % interval
    covered_after                the same of the other rows after one row was measured; the mean over which one
    bias                         mean of predicted / measured - 1
    one_scalar                   MAPE of the other rows if one row sets the scale alone: the median over which one
    p_value                      of the two-sided binomial test that intervals contain 90 % of measured times, 0 to 1
    interval_score               mean interval score of the logarithms of times (Winkler 1972)
    constant_interval_score      the same for intervals of a constant relative width around the same predictions, which
                                 90 % of the other tables' rows need
    plain, constant_mfu          MAPE of both trivial formulas with the constants of the other tables
    ============================ ======================================================================================

    The names that end in `after` say the same of the other rows after one row was measured.
    """
    tables = [one.table for one in found]
    tried = trials(found)
    widths = [best_widths(tried, one.place) for one in found]
    before = [one.before(width) for one, width in zip(found, widths, strict=True)]
    after = [one.after(width, is_exact=True) for one, width in zip(found, widths, strict=True)]
    is_fitted = [t.is_fitted for t in tables]
    constant = constant_scores([[one] for one in before], is_fitted)
    constant_after = constant_scores(after, is_fitted)
    result = {}
    for place, t in enumerate(tables):
        rows, others = len(t.rows), [other for other in tables if other.is_fitted and other is not t]
        off = before[place].off
        covered_after = float(np.mean([turn.covered for turn in after[place]]))
        result[t.name] = {
            "rows": rows,
            "left_out": before[place].mape,
            "after": float(np.median([turn.mape for turn in after[place]])),
            "covered": before[place].covered,
            "covered_after": covered_after,
            "bias": 100 * float(np.expm1(-off).mean()),
            "one_scalar": _one_scalar(off),
            "p_value": coverage_p_value(int(inside(*before[place]).sum()), rows),
            "p_value_after": coverage_p_value(round(covered_after / 100 * rows), rows),
            "interval_score": before[place].score,
            "constant_interval_score": constant[place],
            "interval_score_after": float(np.mean([turn.score for turn in after[place]])),
            "constant_interval_score_after": constant_after[place],
            "plain": baseline(t, others, plain_seconds),
            "constant_mfu": baseline(t, others, constant_mfu_seconds),
        }
    return result


def constant_scores(tables: Sequence[Sequence[Ends]], is_fitted: Sequence[bool]) -> list[float]:
    """Interval score of each table with the constant relative width that 90 % of the other fitted tables need.

    Args:
        tables: Rows of each table: once, or once for each row that was measured.
        is_fitted: Whether each table was fitted.
    """
    joined = [np.concatenate([turn.off for turn in turns]) for turns in tables]
    result = []
    for place, off in enumerate(joined):
        others = (other for other, known in enumerate(is_fitted) if known and other != place)
        width = constant_half_width([joined[other] for other in others])
        result.append(100 * interval_score(off, width, width))
    return result


def _one_scalar(off: Floats) -> float:
    """MAPE of the other rows if each row in turn sets the scale alone: the median over which one."""
    turns = [np.abs(np.expm1(off[row] - np.delete(off, row))).mean() for row in range(len(off))]
    return 100 * float(np.median(turns))


Formula = Callable[..., Floats]


def baseline(t: Table, others: Sequence[Table], formula: Formula) -> float:
    """MAPE of a trivial formula whose constant is the median of the other tables' medians."""
    measured = np.array([row.seconds for row in t.rows])
    guess = formula(t.rows, {"": constant_of(others, formula)})
    return 100 * float(np.abs(guess / measured - 1).mean())


def constant_of(tables: Sequence[Table], formula: Formula) -> float:
    ratios = [formula(t.rows, {"": 1.0}) / np.array([row.seconds for row in t.rows]) for t in tables]
    return float(np.median([np.median(ratio) for ratio in ratios]))


def print_scores(scores: Mapping[str, Mapping[str, float]]) -> None:
    """Print the scores of each table, their medians and their extremes."""
    for name, line in scores.items():
        print(name.ljust(32), " ".join(f"{key} {value:.3g}" for key, value in line.items()))
    for key in ("left_out", "after", "one_scalar", "covered", "plain", "constant_mfu"):
        values = [line[key] for line in scores.values()]
        print(
            key.ljust(14), f"median {np.median(values):.1f}, least {min(values):.1f}, most {max(values):.1f}"
        )
    tested = {name: line for name, line in scores.items() if line["rows"] >= ENOUGH}
    rejected = [name for name, line in tested.items() if min(line["p_value"], line["p_value_after"]) < 0.05]
    print(f"coverage rejected in {len(rejected)} of {len(tested)} tables:", *rejected)
