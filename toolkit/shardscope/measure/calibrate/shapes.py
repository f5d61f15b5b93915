"""Factors of layer shapes, learnt from the residuals of measured steps after constants are fitted.

In 519 rows from an A100 cluster (vTrain), rows with the same shape differ from their predictions by the same factor,
within 2 %, whatever the number of layers, stages and replicas; the factors of different shapes vary by 10 %. So a
factor is the mean deviation of its rows, shrunk towards 1 according to standard deviations of 10 % (factors) and 3 %
(rows). A shape with rows of only one configuration gets no factor, because its effect cannot be separated from that of
the configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardscope.calibration.calibration import Calibration
from shardscope.calibration.layer_shape import SHAPE_SPREAD, shape_of
from shardscope.calibration.spread import Floats
from shardscope.measure.calibrate.rows import Row, RowGroups

NOISE = 0.03
"""Standard deviation of the logarithm of measured / predicted time, of rows with one shape."""
_STEP = 0.05
_BETTER = 0.8
"""Largest ratio of the errors of left-out configurations with factors and without, for factors to be kept."""
_ENOUGH = 12
"""Minimum number of configurations for learning factors. With this many, deviations that are independent of shapes
yield factors in about one table of 25; with half as many, in one of five."""


class Shaped(NamedTuple):
    """Factors of shapes, and the residuals log(measured / predicted) with them."""

    factors: dict[str, float]
    residuals: Floats
    left_out: Floats
    """Residuals with factors learnt from the shape's rows of other configurations."""

    def helps(self, left_out: Floats) -> bool:
        """Return whether factors reduce the errors of rows whose configuration was left out."""
        return bool(np.abs(self.left_out).mean() < _BETTER * np.abs(left_out).mean())


def learnt(rows: Sequence[Row], known: Calibration, off: Floats, left_out: Floats, weights: Floats) -> Shaped:
    """Return the factors of the rows' shapes.

    Args:
        rows: Measured steps.
        known: Calibration with constants fitted to them.
        off: log(measured / predicted) of each row with this calibration.
        left_out: log(measured / predicted) of each row with constants fitted without its configuration.
        weights: Weight of each row.
    """
    slope = _slopes(rows, known)
    cells: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        cells[shape_of(row.model, row.layout)].append(place)
    configurations = [row.configuration for row in rows]
    factors, residuals, without = {}, np.array(off), np.array(left_out)
    for name, cell in cells.items():
        if len({configurations[place] for place in cell}) < 2:
            continue
        step = _mean(off, slope, weights, cell)
        factors[name] = float(np.exp(step))
        residuals[cell] -= slope[cell] * step
        for place in cell:
            others = [each for each in cell if configurations[each] != configurations[place]]
            without[place] -= slope[place] * _mean(left_out, slope, weights, others)
    return Shaped(factors, residuals, without)


def helpful(
    rows: Sequence[Row], known: Calibration, off: Floats, left_out: Floats, weights: Floats
) -> Shaped | None:
    """Return the factors of the rows' shapes if they are significant; for the arguments, see `learnt`."""
    if len({row.configuration for row in rows}) < _ENOUGH:
        return None
    found = learnt(rows, known, off, left_out, weights)
    return found if found.helps(left_out) else None


def with_factors(known: Calibration, factors: dict[str, float]) -> Calibration:
    """Return a calibration in which each shape takes longer by its factor."""
    before = known.shapes
    return known.replace(
        shapes=before | {name: before.get(name, 1.0) * factor for name, factor in factors.items()}
    )


def _mean(off: Floats, slope: Floats, weights: Floats, places: Sequence[int]) -> float:
    """Return the shrunk mean, in logarithms, of a factor estimated from rows; 0 without rows."""
    at = list(places)
    said = float((weights[at] * slope[at] * off[at]).sum())
    return said / (float((weights[at] * slope[at] ** 2).sum()) + (NOISE / SHAPE_SPREAD) ** 2)


def _slopes(rows: Sequence[Row], known: Calibration) -> Floats:
    """Return the derivative of each row's log predicted time with respect to the log of its shape's factor."""
    tables = RowGroups.of(rows)
    names = {shape_of(row.model, row.layout) for row in rows}
    slower = with_factors(known, dict.fromkeys(names, float(np.exp(_STEP))))
    return np.asarray(np.log(tables.seconds(slower) / tables.seconds(known)) / _STEP)
