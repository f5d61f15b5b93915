"""What a calibration of GPUs shows: what it assumes, how well it predicts, and the measured steps it was fitted to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.calibration.layer_shape import OTHERS
from shardscope.show import Part, Sentences, Table
from shardscope.spec.units import duration_text

if TYPE_CHECKING:
    from shardscope.calibration.calibration import Calibration, FittedRow

_MOST = 20
"""Largest number of measured steps that are listed."""
_HEADER = ("row", "measured", "predicted", "left out", "weight")


def shown(found: Calibration) -> list[Part]:
    """Return the headline, the note, the errors, and one line for each measured step, those with low weight first."""
    low, high = found.quantiles["5"], found.quantiles["95"]
    where = f"{found.device or 'an unknown device'}; measured on {found.measured_on or 'an unknown cluster'}"
    lines = [
        f"Calibration {found.name}",
        f"Software {found.software or 'unknown'} on {where}",
        *([f"Note: {found.note}"] if found.note else []),
        f"On the measured cluster, 90% of steps take {low:.2f} to {high:.2f} times the predicted time",
        *_shapes(found),
        *(_errors(name, score) for name, score in found.scores.items()),
    ]
    return [Sentences(lines), _table(found)]


def _shapes(found: Calibration) -> list[str]:
    factors = [factor for name, factor in found.shapes.items() if name != OTHERS]
    if not factors:
        return []
    low, high = min(factors), max(factors)
    count = len(factors)
    return [
        f"Layers of {count} measured shapes take {low:.2f} to {high:.2f} times as long as the constants say"
    ]


def _errors(name: str, score: dict[str, float]) -> str:
    return f"{name}: mean error {score['mape']:.1f}%, worst {score['max']:.1f}%, {score['rows']:.0f} rows"


def _table(found: Calibration) -> Table:
    shown = sorted(found.rows, key=lambda row: row.weight)[:_MOST]
    rest = len(found.rows) - len(shown)
    return Table(
        _HEADER, [*map(_cells, shown)], more=f"and {rest} more" if rest else "", num_left=len(_HEADER)
    )


def _cells(row: FittedRow) -> tuple[str, ...]:
    out = "" if row.left_out_s is None else _with_error(row.left_out_s, row.measured_s)
    return (
        row.label, duration_text(row.measured_s), _with_error(row.predicted_s, row.measured_s), out,
        f"{row.weight:.2f}",
    )  # fmt: skip


def _with_error(predicted: float, measured: float) -> str:
    return f"{duration_text(predicted)} ({predicted / measured - 1:+.1%})"
