"""Prediction errors on tables of measured steps, one line per table, and the errors of two trivial formulas.

Each row is predicted as a user's row is, with the calibration of its device and software. Rows that were fitted are
scored only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from published.formulas import Floats, Ranking, constant_mfu_seconds, plain_seconds
from published.one_step import OneStep
from shardscope.calibration.calibration import Calibration
from shardscope.measure.calibrate.rows import Row, Score, calibration_of_row, predicted_seconds


class Line(NamedTuple):
    """The scores of one data set."""

    dataset: str
    rows: str
    """``"fitted"``; ``"held out"`` if the calibration was fitted to other rows of the data set, which may differ
    in the number of devices only; or ``"never fitted"`` if it was fitted to other data sets only."""
    calibrations: tuple[str, ...]
    score: Score
    one_step: OneStep
    """Intervals, and errors after one row was measured; of several calibrations, the mean weighted by rows."""
    plain: Score
    """Score of the plain formula, which has one constant per data set and precision; see `formulas.plain_seconds`."""
    constant_mfu: Score
    """Score of the formula that divides the model's FLOPs by a constant fraction of the peak FLOP/s."""
    ranking: Ranking
    """How good the layouts are that are predicted to be fastest."""
    scaled_plain: float
    """MAPE of the plain formula's other rows after its constant was set by one row: the median over which one."""

    def to_dict(self) -> dict[str, object]:
        """Return the line as JSON has it."""

        def figures(score: Score) -> dict[str, float]:
            return {
                "mape_percent": score.mape, "worst_percent": score.worst, "rank_correlation": score.rank,
            }  # fmt: skip

        return {
            "dataset": self.dataset,
            "rows": self.rows,
            "n": self.score.rows,
            **figures(self.score),
            "groups": self.ranking.groups,
            "groups_with_best_chosen": self.ranking.near,
            "covered_percent": self.one_step.covered,
            "after_one_step_mape_percent": self.one_step.after,
            "covered_after_one_step_percent": self.one_step.covered_after,
            "interval_score_percent": self.one_step.interval_score,
            "interval_score_after_one_step_percent": self.one_step.interval_score_after,
            "plain_after_one_step_mape_percent": self.scaled_plain,
            "plain_formula": figures(self.plain),
            "constant_mfu": figures(self.constant_mfu),
            "calibrations": list(self.calibrations),
        }


def board(
    datasets: Mapping[str, Sequence[Row]],
    *,
    fitted: bool = False,
    chosen: Callable[[Row], Calibration] | None = None,
) -> list[Line]:
    """Return one line per data set.

    Args:
        datasets: Rows by name of the data set.
        fitted: Whether there is another line for the rows to which the constants were fitted.
        chosen: Function that chooses the calibration of a row; None for `calibration_of_row`.
    """
    chosen = chosen or calibration_of_row
    lines = []
    for name, rows in datasets.items():
        used = [chosen(row) for row in rows]
        seen = [row for row, known in zip(rows, used, strict=True) if row.key in known.fitted]
        unseen = [row for row, known in zip(rows, used, strict=True) if row.key not in known.fitted]
        is_partly_fitted = any(key.startswith(f"{name},") for known in used for key in known.scores)
        if unseen:
            kind = "held out" if seen or is_partly_fitted else "never fitted"
            lines.append(_line(name, unseen, kind, chosen))
        if seen and fitted:
            lines.append(_line(name, seen, "fitted", chosen))
    return lines


def _line(dataset: str, rows: Sequence[Row], kind: str, chosen: Callable[[Row], Calibration]) -> Line:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(chosen(row).name, []).append(row)
    columns: list[list[float]] = [[], [], [], []]
    steps = []
    for mine in found.values():
        known = chosen(mine[0])
        columns[0].extend(row.seconds for row in mine)
        columns[1].extend(predicted_seconds(mine, known))
        columns[2].extend(plain_seconds(mine, known.constant_rate))
        columns[3].extend(constant_mfu_seconds(mine, known.constant_mfu))
        steps.append(OneStep.of(mine, known))
    measured, *guesses = (np.array(column) for column in columns)
    ours, plain, constant = (Score.of(guess, measured) for guess in guesses)
    shares = [len(mine) / len(rows) for mine in found.values()]
    one_step = OneStep(*(float(np.dot(shares, column)) for column in zip(*steps, strict=True)))
    in_order = [row for mine in found.values() for row in mine]
    ranking = Ranking.of(in_order, guesses[0])
    scaled = _scaled(guesses[1], measured)
    return Line(dataset, kind, tuple(found), ours, one_step, plain, constant, ranking, scaled)


def _scaled(guess: Floats, measured: Floats) -> float:
    """Return the MAPE of the other rows if each row in turn sets the scale: the median over which one."""
    ratios = guess / measured
    if len(ratios) < 2:
        return float("nan")
    turns = [np.abs(np.delete(ratios, row) / ratios[row] - 1).mean() for row in range(len(ratios))]
    return 100 * float(np.median(turns))
