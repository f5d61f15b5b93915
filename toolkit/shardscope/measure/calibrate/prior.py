"""What is known of the constants before a fit, and the order in which a calibration lists them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shardscope.measure.calibrate.design import Knot
from shardscope.measure.calibrate.fit import Prior
from shardscope.spec.constants import CONSTANTS
from shardscope.spec.host_calibration import Constant, HostCalibration

_NORMAL = 3.29
"""Width of a 90 % interval of a normal distribution, in standard deviations."""
_LEAST = 0.02
"""Smallest standard deviation of a logarithm that an interval stands for."""


def prior_of(knots: Sequence[Knot], before: HostCalibration, deviation: float | None) -> Prior:
    """Return the logarithms of the constants in a calibration, and their standard deviations.

    Args:
        knots: The constants to fit.
        before: The calibration.
        deviation: The standard deviations; None takes them from the intervals of `before`.
    """
    means, deviations = [], []
    for name, ranks, transport in knots:
        known = transport if before.has(name, transport) else "tcp"
        rows = before.rows(name, known)
        means.append(np.log(before.value(name, ranks=ranks or 1, transport=known)))
        nearest = min(rows, key=lambda row: abs((row.ranks or 1) - (ranks or 1)))
        width = np.log(nearest.high / max(nearest.low, 1e-3 * nearest.value)) / _NORMAL
        deviations.append(max(width, _LEAST) if deviation is None else deviation)
    return Prior(np.array(means), np.array(deviations))


def in_order(rows: Iterable[Constant]) -> tuple[Constant, ...]:
    """Return the constants in the order of `CONSTANTS`, then by transport, ranks and nodes."""
    names = list(CONSTANTS)
    return tuple(
        sorted(
            rows,
            key=lambda row: (names.index(row.name), row.transport or "", row.ranks or 0, row.nodes or ()),
        )
    )
