"""Scores of each table by effects fitted without it, with intervals whose widths the other tables choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from published.all_tables import Table
from published.effects_fit import Found, Spreads, estimated
from shardscope.measure.scoreboard.intervals import ENOUGH, Z, coverage_p_value, inside
from shardscope.measure.scoreboard.one_step import Ends, constant_scores, ends_of, turns_of
from shardscope.measure.scoreboard.score import constant_mfu_seconds, plain_seconds

Floats = npt.NDArray[np.float64]
Widths = tuple[float, float]
WIDER, NOISIER = (0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6), (1.0, 1.3, 1.7, 2.2)
"""Factors that are tried: of the covariance of a new table's constants, and of the standard deviation of its rows. The
formulas are not exact, so tables differ more than the likelihood of linear effects says."""


class LeftOut(NamedTuple):
    """What the other tables say about a table."""

    slope: Floats
    off: Floats
    covariance: Floats
    noise: float

    def before(self, widths: Widths) -> Ends:
        """Return the table's intervals without a measured step."""
        wider, noisier = widths
        within = Z * noisier * self.noise
        return ends_of(self.slope, self.off, wider * self.covariance, within, within)

    def after(self, widths: Widths) -> list[Ends]:
        """Return the other rows' intervals after each row was measured."""
        wider, noisier = widths
        return turns_of(self.slope, self.off, wider * self.covariance, noisier * self.noise)


def left_out(place: int, tables: Sequence[Table], seen: Found, x: Floats) -> LeftOut:
    """Predict a table by effects that the others make likely; x are the standard deviations to start from."""
    t, rest = tables[place], seen.seen.without(place)
    found = Found.of(rest, Spreads.of(estimated(rest, x)))
    effects = {**t.shared, "table new": 1.0}
    off, slope = t.linear(found.mean(effects))
    return LeftOut(slope, off, found.covariance(effects), found.spreads.noise)


def best_widths(others: Sequence[LeftOut]) -> Widths:
    """Return the factors with the least interval score on these tables, before and after one step together."""

    def loss(widths: Widths) -> float:
        each = [
            one.before(widths).score + float(np.mean([turn.score for turn in one.after(widths)]))
            for one in others
        ]
        return float(np.mean(each))

    return min(product(WIDER, NOISIER), key=loss)


def scores(tables: Sequence[Table], found: Sequence[LeftOut]) -> dict[str, dict[str, float]]:
    """Return the scores of all tables, each with the widths that the others choose."""
    places = range(len(tables))
    widths = [best_widths([found[other] for other in places if other != place]) for place in places]
    before = [one.before(width) for one, width in zip(found, widths, strict=True)]
    after = [one.after(width) for one, width in zip(found, widths, strict=True)]
    constant, constant_after = constant_scores([[one] for one in before]), constant_scores(after)
    result = {}
    for place, t in enumerate(tables):
        rows, others = len(t.rows), [*tables[:place], *tables[place + 1 :]]
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
