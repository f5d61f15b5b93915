"""Uncertainty of a calibration's constants on another cluster, and of a step time that is predicted from them.

Let x be the deviations of the logarithms of all constants from the calibration's, and of a common scale of
all rates. They are normally distributed around 0 with the calibration's covariance. The logarithm of a step
time is nearly linear in x, so its variance is g' C g, with the gradient g of that logarithm. Constants that
do not matter for a layout do not widen its interval, and constants that no measurement determined widen it
most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, hypot, inf, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.calibration.calibration import FACTORS, FRACTIONS, Calibration, Interval
from shardscope.calibration.layer_shape import OTHERS, SHAPE_SPREAD

Floats = npt.NDArray[np.float64]

_STEP = 1e-3
_SCALE = list(FACTORS).index("scale")
_FAR = 50.0
"""Logarithm by which all factors are lowered, large enough that no fraction is at its limit."""


def moved(calibration: Calibration, x: Sequence[float] | Floats) -> Calibration:
    """Return the calibration with its factors moved by x, in the order of `FACTORS`; see `Calibration.moved`."""
    return calibration.moved(dict(zip(FACTORS, map(float, x), strict=True)))


def stacked(calibrations: Sequence[Calibration]) -> Calibration:
    """Return one calibration whose constants are arrays, with one element for each given calibration.

    Formulas broadcast, so that one evaluation predicts a table of layouts whose rows have different constants. The
    calibrations may differ in their `FACTORS` only.
    """
    names = [name for name in FACTORS if name != "scale"]
    columns = np.array([[getattr(each, name) for name in names] for each in calibrations])
    return calibrations[0].model_copy(update=dict(zip(names, columns.T, strict=True)))


def slopes(
    seconds: Callable[[Calibration], Floats], calibration: Calibration, at: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return the logarithms of predicted seconds, shape `(rows,)`, and their derivatives, shape `(rows, factors)`.

    For a fraction that is already 1, the derivative is the one towards smaller values.

    Args:
        seconds: Function that predicts the step times of some rows with a calibration.
        calibration: The calibration.
        at: Values of the factors, in the order of `FACTORS`; None for 0.
    """
    x = np.zeros(len(FACTORS)) if at is None else at
    around, steps = _around(calibration, x)
    start, *columns = (np.log(seconds(each)) for each in around)
    return start, np.stack([column - start for column in columns], axis=1) / steps


def _around(calibration: Calibration, x: Floats) -> tuple[list[Calibration], Floats]:
    """Return the calibration at x, the calibrations with each factor in turn moved by its step, and the steps.

    A factor at its limit is moved towards smaller values.
    """
    steps = np.where(limits(calibration, x) < x + _STEP, -_STEP, _STEP)
    return [moved(calibration, x), *(moved(calibration, x + step) for step in np.diag(steps))], steps


def limits(calibration: Calibration, x: Floats) -> Floats:
    """Return the largest value up to which each factor has an effect, given the scale in x: fractions stay at most
    1.
    """
    found = np.full(len(FACTORS), np.inf)
    far = calibration.moved({**dict.fromkeys(FACTORS, -_FAR), "scale": float(x[_SCALE])})
    for place, name in enumerate(FACTORS):
        if name.endswith(FRACTIONS):
            value = getattr(far, name)
            found[place] = inf if value == 0 else -log(value) - _FAR
    return found


def covariance_of(calibration: Calibration) -> Floats:
    """Return the covariance of the factors, shape `(factors, factors)`, in the order of `FACTORS`."""
    if calibration.covariance:
        return np.array(calibration.covariance)
    return np.diag(np.square(list(FACTORS.values())))


_Z = 1.645
"""Half width of an interval that contains 90 % of a normal distribution, in standard deviations."""
_NAMED = 2


class Widened(NamedTuple):
    """90 % prediction interval of a step time, and the constants that contribute most to its width."""

    interval: Interval
    within: float
    """Half width, in logarithms, of the interval on the measured cluster itself."""
    between: float
    """Half width, in logarithms, from constants that may differ on this cluster."""
    shares: tuple[tuple[str, float], ...]
    """Constants, and possibly an unmeasured layer shape, each with its share of the variance between clusters; largest
    first."""

    @property
    def sentence(self) -> str:
        """A sentence on what the interval covers."""
        within, between = (f"{exp(half):.2f}" for half in (self.within, self.between))
        named = " and ".join(f"{name} ({share:.0%})" for name, share in self.shares[:_NAMED])
        return (
            f"90% interval: up to a factor of {within} between steps on one cluster, and of {between} between "
            f"clusters, mainly from {named}"
        )


def half_widths(slope: Floats, calibration: Calibration) -> Floats:
    """Return the half width, in logarithms, of each row's 90 % interval from the uncertainty of the constants."""
    variance = np.einsum("ri,ij,rj->r", slope, covariance_of(calibration), slope)
    return np.asarray(_Z * np.sqrt(np.maximum(variance, 0.0)))


def shape_half_widths(seconds: Callable[[Calibration], Floats], calibration: Calibration) -> Floats:
    """Return the half width, in logarithms, of each row's 90 % interval from the factor of an unmeasured shape.

    It is 0 if the calibration has the factor, or no factors at all: the noise then includes the effect of shapes.

    Args:
        seconds: Function that predicts the step times of some rows with a calibration.
        calibration: The calibration.
    """
    start = seconds(calibration)
    if not calibration.shapes:
        return np.zeros_like(start)
    others = calibration.shapes.get(OTHERS, 1.0) * exp(SHAPE_SPREAD)
    slower = seconds(calibration.model_copy(update={"shapes": {**calibration.shapes, OTHERS: others}}))
    return np.asarray(_Z * np.log(slower / start))


def widened(seconds: Callable[[Sequence[Calibration]], Floats], calibration: Calibration) -> Widened:
    """Return the 90 % prediction interval of a step time, including the uncertainty of this cluster's constants.

    Args:
        seconds: Function that predicts the step time with each of some calibrations, which differ in their `FACTORS`.
        calibration: The calibration.
    """
    around, steps = _around(calibration, np.zeros(len(FACTORS)))
    predicted = np.log(seconds(around))
    start, slope = predicted[:1], (predicted[1:] - predicted[0])[None] / steps
    variances = dict(zip(FACTORS, slope[0] * (covariance_of(calibration) @ slope[0]), strict=True))
    shape = float(shape_half_widths(lambda each: seconds([each]), calibration)[0])
    if shape:
        variances["shape of layers"] = (shape / _Z) ** 2
    between = hypot(float(half_widths(slope, calibration)[0]), shape)
    low, high = (log(calibration.quantiles[level]) for level in ("5", "95"))
    time = float(np.exp(start[0]))
    interval = Interval(time * exp(-hypot(low, between)), time * exp(hypot(high, between)))
    whole = max(sum(variances.values()), 1e-12)
    shares = ((name, float(variance / whole)) for name, variance in variances.items())
    named = tuple(sorted(shares, key=lambda pair: -pair[1]))
    return Widened(interval, (high - low) / 2, between, named)
