"""The scoreboard: prediction errors on the held-out rows of every data set, and the errors of two trivial formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardscope.measure.scoreboard.rows import Row, predicted_seconds
from shardscope.measure.scoreboard.score import Score, constant_mfu_seconds, plain_seconds
from shardscope.spec.calibration import Calibration

_BY_DEVICE = {
    "a100-80gb": "a100-fsdp",
    "a100-40gb": "a100-fsdp",
    "h100-80gb": "h100-fsdp",
    "h100-96gb": "h100-fsdp",
}
CALIBRATIONS: Mapping[str, str] = {
    "vtrain_ground_truth_multi": "a100-megatron",
    "vtrain_ground_truth_single": "a100-megatron",
    "simumax_b200": "b200-megatron",
    "Megatron SC21, table 1": "a100-megatron",
    "Megatron SC21, table 2, PTD-P": "a100-megatron",
    "Megatron SC21, table 2, ZeRO-3": "a100-megatron",
    "Korthikanti, table 5": "a100-megatron",
}
"""Calibration of each data set; for data sets that are not listed, the row's device determines the calibration."""


class Line(NamedTuple):
    """The scores of one data set."""

    dataset: str
    rows: str
    """``"held out"``, ``"fitted"``, or ``"never fitted"`` if no row of the data set was fitted."""
    calibrations: tuple[str, ...]
    score: Score
    plain: Score
    """Score of the plain formula, which has one constant per data set and precision; see `score.plain_seconds`."""
    constant_mfu: Score
    """Score of the formula that divides the model's FLOPs by a constant fraction of the peak FLOP/s."""


def board(datasets: Mapping[str, Sequence[Row]], *, fitted: bool = False) -> list[Line]:
    """Return one line per data set; with `fitted`, also one for the rows to which the constants were fitted."""
    lines = []
    for name, rows in datasets.items():
        seen = [row for row in rows if row.key in _calibration(name, row).fitted]
        unseen = [row for row in rows if row.key not in _calibration(name, row).fitted]
        if unseen:
            lines.append(_line(name, unseen, "held out" if seen else "never fitted"))
        if seen and fitted:
            lines.append(_line(name, seen, "fitted"))
    return lines


def _calibration(dataset: str, row: Row) -> Calibration:
    return Calibration.of(CALIBRATIONS.get(dataset) or _BY_DEVICE[row.cluster.device.name])


def _line(dataset: str, rows: Sequence[Row], kind: str) -> Line:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_calibration(dataset, row).name, []).append(row)
    columns: list[list[float]] = [[], [], [], []]
    for name, mine in found.items():
        known = Calibration.of(name)
        columns[0].extend(row.seconds for row in mine)
        columns[1].extend(predicted_seconds(mine, known))
        columns[2].extend(plain_seconds(mine, known.constant_rate))
        columns[3].extend(constant_mfu_seconds(mine, known.constant_mfu))
    measured, *guesses = (np.array(column) for column in columns)
    ours, plain, constant = (Score.of(guess, measured) for guess in guesses)
    return Line(dataset, kind, tuple(found), ours, plain, constant)
