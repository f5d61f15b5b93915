"""Fit a calibration to measured steps of a GPU cluster: each constant stays near the prior unless rows contradict it.

The residuals are logarithms of measured / predicted time, with a Cauchy loss, so that a row disturbed by another
program has little weight, unless there are so many outliers that the wrong rows cannot be identified. With one row, the
least certain constants change most, above all the common scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardscope.analytic.compute.flops import least_flops
from shardscope.calibration.calibration import FACTORS, Calibration, FittedRow
from shardscope.calibration.choice import calibration_for, without_foreign_shapes
from shardscope.calibration.effects import fitted_noise, row_noise
from shardscope.calibration.layer_shape import OTHERS
from shardscope.calibration.software import software_of
from shardscope.calibration.spread import (
    Floats,
    covariance_of,
    half_widths,
    limits,
    moved,
    shape_half_widths,
    slopes,
)
from shardscope.errors import SpecError, require
from shardscope.measure.calibrate.robust import minimum
from shardscope.measure.calibrate.rows import Row, RowGroups, Score
from shardscope.measure.calibrate.shapes import helpful, with_factors
from shardscope.measure.calibrate.tables import Given, Rows, read_rows
from shardscope.prediction.step.machine import Machine
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Model, Transformer

_CAUCHY = 2.0
"""Residual, in standard deviations of intervals, at which a row has half the weight."""
_NARROWING = (16.0, 4.0, 1.0)
"""Factors of `_CAUCHY` in successive fits; a wide loss has a single minimum (Blake and Zisserman 1987)."""
_ENOUGH = 3
"""Minimum number of configurations for identifying outliers and for cross-validated errors."""
_PRIOR_ROWS = 4.0
"""Weight of the prior noise in the estimate of the noise, as a number of rows."""
_Z = 1.645
"""Half width of an interval that contains 90 % of a normal distribution, in standard deviations."""
_SURPRISING = 3.0
"""Number of standard deviations from the prior's prediction above which a row is reported."""
_MOST_RATIO = 30.0
"""Largest ratio of measured and predicted time; measured clusters differ by less than 4."""
_OUTLIER = 0.5
"""Weight below which a row is reported as an outlier."""
_TOO_MANY = 0.5
"""Fraction of outliers above which all rows are weighted equally, because the wrong rows cannot be identified."""


class Fit(NamedTuple):
    """Factors that fit the rows best, with their covariance."""

    x: Floats
    covariance: Floats
    residuals: Floats
    """log(measured / predicted) of each row."""
    left_out: Floats
    """log(measured / predicted) of each row, predicted by a fit without the rows of its configuration."""
    weights: Floats
    between: Floats
    """Half width, in logarithms, of each row's 90 % interval due to the uncertainty of the constants."""
    first: Floats
    """log(measured / predicted) of each row, predicted with the prior."""
    surprise: Floats
    """`first` in the prior's standard deviations."""


def calibrate_rows(
    rows: Rows,
    *,
    cluster: Cluster | None = None,
    model: Model | str | None = None,
    layout: Layout | None = None,
    software: str | None = None,
    prior: Calibration | None = None,
) -> Calibration:
    """Return a calibration fitted to measured steps; see `shardscope.calibrate`."""
    known = Model.of(model) if isinstance(model, str) else model
    if known is not None:
        require(known, Transformer, by="calibrate", write="model='gpt3-175b', or a Transformer")
        assert isinstance(known, Transformer)
    if layout is not None:
        require(layout, Layout, by="calibrate", write="layout=ss.Layout(...)")
    read = read_rows(rows, Given(cluster, known, layout, software))
    if prior is not None:
        _check_new(read, prior)
    kind = (read[0].cluster.device, software_of(read[0].software))
    before = calibration_for(*kind) if prior is None else without_foreign_shapes(prior, *kind)
    if OTHERS in before.shapes:  # the rows' own deviations will include what shapes do
        before = before.replace(shapes={})
    found = fitted(read, before)
    plain = moved(before, found.x)
    shaped = helpful(read, plain, found.residuals, found.left_out, found.weights)
    if shaped is None:
        return _calibration(read, before, found)
    unknown = shape_half_widths(RowGroups.of(read).seconds, with_factors(plain, shaped.factors))
    found = found._replace(
        residuals=shaped.residuals,
        left_out=shaped.left_out,
        weights=_weights(shaped.residuals, _CAUCHY * row_noise(read[0].software)),
        between=np.hypot(found.between, unknown),
    )
    return with_factors(_calibration(read, before, found), shaped.factors)


def _check_new(rows: Sequence[Row], prior: Calibration) -> None:
    seen = {(row.label, row.measured_s) for row in prior.rows}
    for row in rows:
        if row.key in prior.fitted and (row.inputs["label"], row.seconds) in seen:
            raise SpecError(
                f"{row.inputs['label']} was already fitted by prior={prior.name!r} and would count twice; leave it "
                "out, or omit prior"
            )


def fitted(rows: Sequence[Row], before: Calibration) -> Fit:
    """Return the factors of `before` that fit the rows best."""
    measured, tables = np.log([row.seconds for row in rows]), RowGroups.of(rows)
    groups = _configurations(rows)
    inverse = np.asarray(np.linalg.inv(covariance_of(before)), np.float64)
    nothing, noise, wide = np.zeros(len(FACTORS)), *_noises(rows)
    if before.rows:  # their wider deviation is in the covariance; a narrower one now would forget them
        noise = wide
    _check_peak(rows, before)
    root = np.asarray(np.linalg.cholesky(inverse).T, np.float64)

    def residuals(x: Floats) -> Floats:
        return np.asarray((np.log(tables.seconds(moved(before, x))) - measured) / noise)

    def slopes_at(x: Floats) -> Floats:
        return slopes(tables.seconds, before, x)[1] / noise

    first, prior_slope = slopes(tables.seconds, before, nothing)
    _check_possible(rows, measured - first)
    apart = np.abs(measured - first - np.median(measured - first))
    agree = apart.max() < _CAUCHY * wide  # none can be an outlier, however far all of them are from the prior
    for widths in ((np.inf,),) if agree or len(set(groups)) < _ENOUGH else (_NARROWING, (np.inf,)):
        x = nothing
        for width in widths:
            scale = _CAUCHY * width * wide / noise
            x = minimum(residuals, slopes_at, x, mean=nothing, root=root, scale=scale)
            x = np.minimum(x, np.maximum(limits(before, x), 0.0))
        predicted, slope = slopes(tables.seconds, before, x)
        off = measured - predicted
        weights = _weights(off, _CAUCHY * widths[-1] * wide)
        if np.mean(weights < _OUTLIER) < _TOO_MANY:
            break
    certain = weights / noise**2
    covariance = np.asarray(np.linalg.inv(inverse + (slope.T * certain) @ slope), np.float64)
    gain = covariance @ slope.T * certain
    # The fitted rows may be as far off as intervals say that rows are.
    covariance = covariance + (gain * ((wide**2 - noise**2) / weights)) @ gain.T
    left_out = _left_out(inverse, slope, off + slope @ x, certain, groups)
    between = _Z * np.sqrt(np.einsum("ri,ij,rj->r", slope, covariance, slope))
    spread = np.hypot(wide, half_widths(prior_slope, before) / _Z)
    return Fit(x, covariance, off, left_out, weights, between, measured - first, (measured - first) / spread)


def _noises(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the standard deviation of rows in the fit, and the larger one that decides whether a row is unusual."""
    return fitted_noise(rows[0].software), row_noise(rows[0].software)


def _check_peak(rows: Sequence[Row], before: Calibration) -> None:
    """Raise if a row is faster than its devices can compute, whatever the constants."""
    for row in rows:
        machine = Machine.of(row.cluster, before, row.layout.precision)
        flops = float(least_flops(row.model, row.layout.global_batch))
        share = machine.utilization(flops, row.layout.num_devices, row.seconds)
        if share > 1.0:
            raise SpecError(
                f"{row.inputs['label']}: a step of {row.seconds:.4g} s would be {share:,.0%} of the devices' peak "
                "FLOP/s; check the unit (step_time_s or step_time_ms), global_batch, the model, the precision and the "
                "number of devices"
            )


def _check_possible(rows: Sequence[Row], off: Floats) -> None:
    """Raise if a row differs from the prediction by a factor that no cluster explains, such as ms instead of s."""
    for row, each in zip(rows, off, strict=True):
        if abs(each) > np.log(_MOST_RATIO):
            predicted = row.seconds * float(np.exp(-each))
            raise SpecError(
                f"{row.inputs['label']}: a step of {row.seconds:.4g} s is not plausible, {predicted:.4g} s is "
                "predicted; check the unit (step_time_s or step_time_ms), global_batch and the model"
            )


def _weights(off: Floats, width: float) -> Floats:
    """Return the weight of each row in a Cauchy loss whose residuals count half at `width`."""
    return 1.0 / (1.0 + (off / width) ** 2)


def _configurations(rows: Sequence[Row]) -> list[int]:
    names = [row.configuration for row in rows]
    return [names.index(name) for name in names]


def _left_out(
    inverse: Floats, slope: Floats, target: Floats, weights: Floats, groups: Sequence[int]
) -> Floats:
    """Return log(measured / predicted) of each row by a linearised fit without its configuration."""
    found = np.empty(len(target))
    for group in set(groups):
        mine = np.array(groups) == group
        normal = inverse + (slope[~mine].T * weights[~mine]) @ slope[~mine]
        x = np.linalg.solve(normal, (slope[~mine].T * weights[~mine]) @ target[~mine])
        found[mine] = target[mine] - slope[mine] @ x
    return found


def _calibration(rows: Sequence[Row], before: Calibration, found: Fit) -> Calibration:
    is_robust = len(set(_configurations(rows))) >= _ENOUGH
    usual = row_noise(rows[0].software)
    squares = (np.clip(found.left_out, -3 * usual, 3 * usual) ** 2).sum() if is_robust else 0.0
    count = len(rows) if is_robust else 0
    noise = float(np.sqrt((_PRIOR_ROWS * usual**2 + squares) / (_PRIOR_ROWS + count)))
    first, count_all = rows[0], len(before.rows) + len(rows)
    each = tuple(
        FittedRow(
            label=str(row.inputs["label"]), measured_s=row.seconds, predicted_s=row.seconds * float(np.exp(-off)),
            left_out_s=row.seconds * float(np.exp(-out)) if is_robust else None, weight=float(weight),
        )
        for row, off, out, weight in zip(rows, found.residuals, found.left_out, found.weights, strict=True)
    )  # fmt: skip
    return moved(before, found.x).replace(
        name=f"{first.cluster.device.name}, {first.software}, by {count_all} measured step{'s' * (count_all > 1)}",
        device=first.cluster.device.name,
        software=first.software,
        quantiles={"5": float(np.exp(-1.645 * noise)), "50": 1.0, "95": float(np.exp(1.645 * noise))},
        covariance=tuple(map(tuple, found.covariance.tolist())),
        scores=_scores(rows, found) if is_robust else {},
        rows=(*before.rows, *each),
        fitted=tuple(sorted({*before.fitted, *(row.key for row in rows)})),
        measured_on=f"{first.cluster.num_devices} x {first.cluster.device.name}",
        source="rows given to ss.calibrate",
        note="; ".join(_notes(before, each, found, noise)),
    )


def _scores(rows: Sequence[Row], found: Fit) -> dict[str, dict[str, float]]:
    measured = np.array([row.seconds for row in rows])
    score = Score.of(measured * np.exp(-found.left_out), measured)
    figures = {"mape": score.mape, "max": score.worst, "rank": score.rank, "rows": float(score.rows)}
    known = {name: round(value, 4) for name, value in figures.items() if np.isfinite(value)}
    return {"rows, cross-validated": known}  # equal times have no rank correlation


def _notes(before: Calibration, each: Sequence[FittedRow], found: Fit, noise: float) -> list[str]:
    told = [f"constants that the rows do not determine are taken from {before.name}"]
    common = (
        len(each) > 1
        and bool((np.abs(found.surprise) > _SURPRISING).all())
        and len(set(found.surprise > 0)) == 1
    )
    if common:
        ratio = float(np.exp(np.abs(np.median(found.first))))
        told.append(
            f"all {len(each)} rows are about {ratio:.2g} times {_compared(found.surprise[0])} than {before.name} "
            "predicts; check the unit, global_batch, the model and the number of devices"
        )
    width = np.hypot(found.between, _Z * noise)
    for row, surprise, off, half in zip(each, found.surprise, found.residuals, width, strict=True):
        if row.weight < _OUTLIER:
            ratio = row.measured_s / row.predicted_s
            told.append(
                f"{row.label} is an outlier, {ratio:.2f} times what the other rows imply: its weight is "
                f"{row.weight:.2f}"
            )
        elif abs(off) > half:
            told.append(
                f"{row.label} is outside its own 90 % interval: it took {row.measured_s:.4g} s, but the "
                f"constants fitted to it predict {row.predicted_s:.4g} s; check its unit, model and layout"
            )
        elif abs(surprise) > _SURPRISING and not common:
            told.append(
                f"{row.label} is {abs(surprise):.1f} standard deviations {_compared(surprise)} than {before.name} "
                "predicts; check its unit, model and layout"
            )
    return told


def _compared(surprise: float) -> str:
    return "slower" if surprise > 0 else "faster"
