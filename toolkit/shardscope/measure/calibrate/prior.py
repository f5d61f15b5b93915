"""The prior of the constants before a fit, and the order in which a calibration lists them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shardscope.calibration.constants import CONSTANTS
from shardscope.calibration.host_calibration import Constant, HostCalibration, HostMachine
from shardscope.machine import usable_cores
from shardscope.measure.calibrate.design import Knot
from shardscope.measure.calibrate.fit import Prior
from shardscope.prediction.rates import relative_speed

_VAGUE = 1.0
"""Standard deviation of the logarithm of a constant that was not measured here."""
_NORMAL = 3.29
"""Width of a 90 % interval of a normal distribution, in standard deviations."""
_LEAST = 0.02
"""Lower bound of the standard deviation of a logarithm derived from an interval."""
_BY_BANDWIDTH = ("bandwidth", "optimizer_bandwidth", "codec_bandwidth")


def on_this_machine(before: HostCalibration) -> HostCalibration:
    """Return the calibration of another machine, scaled to this one as `RankRates.of_this_machine` scales it.

    The interval of each constant becomes as wide as for constants that were not measured here.
    """
    speed, cores = relative_speed(before), before.machine.cores / usable_cores()
    faster = {"flops": speed.flops, **dict.fromkeys(_BY_BANDWIDTH, speed.bandwidth)}
    wide = float(np.exp(_VAGUE * _NORMAL / 2))
    rows = []
    for row in before.constants:
        if row.nodes is not None:
            continue  # of pairs of emulated nodes there, which no prediction uses
        if row.name == "link_efficiency" or (row.name, row.ranks) == ("slowdown", 1):
            rows.append(row)  # the same on every machine
            continue
        at = 1.0 if row.ranks is None else row.ranks * cores
        value = faster.get(row.name, 1.0) * before.value(row.name, ranks=at, transport=row.transport)
        rows.append(row.replace(value=value, low=value / wide, high=value * wide, is_measured=False))
    return before.replace(
        machine=HostMachine.here(),
        constants=tuple(rows),
        numpy_flops=before.numpy_flops * speed.flops,
        numpy_bandwidth=before.numpy_bandwidth * speed.bandwidth,
    )


def prior_of(knots: Sequence[Knot], before: HostCalibration, *, is_vague: bool) -> Prior:
    """Return the logarithms of the constants in a calibration, and their standard deviations.

    Args:
        knots: The constants to fit.
        before: The calibration.
        is_vague: Whether the constants are as uncertain as those of another machine (a factor of `e`),
            instead of having their intervals. Constants of an unmeasured transport or number of ranks always
            may.
    """
    known: dict[Knot, Constant] = {
        (row.name, row.ranks, row.transport): row for row in before.constants if row.nodes is None
    }
    means, deviations = [], []
    for name, ranks, transport in knots:
        over = transport if before.has(name, transport) else "tcp"
        means.append(np.log(before.value(name, ranks=ranks or 1, transport=over)))
        row = None if is_vague else known.get((name, ranks, transport))
        deviations.append(_VAGUE if row is None else _deviation(row))
    return Prior(np.array(means), np.array(deviations))


def _deviation(row: Constant) -> float:
    return float(max(np.log(row.high / max(row.low, 1e-3 * row.value)) / _NORMAL, _LEAST))


def in_order(rows: Iterable[Constant]) -> tuple[Constant, ...]:
    """Return the constants in the order of `CONSTANTS`, then by transport, ranks and nodes."""
    names = list(CONSTANTS)
    return tuple(
        sorted(
            rows,
            key=lambda row: (names.index(row.name), row.transport or "", row.ranks or 0, row.nodes or ()),
        )
    )
