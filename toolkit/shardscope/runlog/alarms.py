"""Alarms about a run's layers: rules over the series of trust ratios and error-feedback residuals.

Each rule is a pure function that returns one `Alarm`, or None if no layer exceeds the threshold. The message of an
alarm names the worst layer and gives the number of other affected layers. The docstring of each threshold gives the
reason for its value. The "measured runs" in those docstrings are 20 runs of `mlp` on `digits` and of `gpt-nano` on text
(80 to 400 steps, 2 ranks, seed 0), with several variants of LAMB and LARS and twelve compression methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from shardscope.spec.optimizer import Optimizer

if TYPE_CHECKING:
    from shardscope.runlog.layers import RatioSeries, ResidualSeries

PINNED_SHARE = 0.5
"""Fraction of steps above which a trust ratio at a bound is reported, because the bound then determines the ratio."""
FEWEST_LOOKS = 4
"""Minimum number of sampled steps for the rules `pinned` and `late`."""
BARE_RATE = 10.0
"""Learning rate above which an unscaled step is reported, as a multiple of the usual learning rate for the same
optimizer without trust ratios (Adam 1e-3, SGD 0.1). A layer whose weights are all zero has trust ratio 1, so its step
is not scaled, although the learning rate is meant for scaled steps. Ten times the usual rate is far more than is used
without trust ratios."""
DRIFT = 100.0
"""Factor by which a trust ratio may grow or shrink from the first quarter of the run to the last. In the measured runs
that were healthy, trust ratios changed by factors of 0.8 to 21, and with 1-bit LAMB by factors of up to 51."""
FEWEST_QUARTERS = 8
"""Minimum number of sampled steps for the rules that compare quarters of the run, `drifted` and `piling_up`."""
LATE = 10.0
"""Largest norm of a layer's residual in the last quarter of the run, as a multiple of the gradient norm of one step.
This multiple is roughly the age, in steps, of the values that are sent. Seven of the measured runs exceeded this
threshold; in five of them, the final accuracy was at least ten percentage points lower than without compression. Of the
runs below the threshold, only one lost that much accuracy."""
PILES_UP = 2.0
"""Factor by which the norm of a layer's residual may grow from the second quarter of the run to the last. The alarm is
raised only if the norm grows from each of these quarters to the next and ends above the gradient norm of one step. If
error feedback keeps up, the norm levels off: it grew by factors of at most 1.4 in the measured runs. If nothing is ever
sent, it grows linearly with the steps, by a factor of 2.3. In two runs that diverged, it grew by factors of 16 and
18."""
CARRIES = 0.1
"""Gradient norm below which a layer's residual is not checked, as a fraction of the gradient norm over all layers.
Layers with such small gradients, mostly biases, can be sent late with little harm."""


@dataclass(frozen=True)
class Alarm:
    """One alarm about the layers of a run.

    Attributes:
        kind: Type of alarm: ``not finite``, ``not adapted``, ``exploding``, ``vanishing``, ``bare step``, ``pinned``,
            ``late`` or ``piling up``.
        layers: Names of the affected layers, the worst first; empty if all layers are affected.
        value: Value that the rule compares with its threshold, for the worst layer; 0 for ``not adapted``.
        text: Message that describes the problem and suggests a remedy.
    """

    kind: str
    layers: tuple[str, ...]
    value: float
    text: str

    def __str__(self) -> str:
        return self.text


def alarms_of(
    optimizer: Optimizer | None, ratios: Sequence[RatioSeries], residuals: Sequence[ResidualSeries]
) -> tuple[Alarm, ...]:
    """Apply all rules to these series, and return the alarms, in the order of the rules' severity.

    Args:
        optimizer: Optimizer of the run; None if unknown.
        ratios: Trust ratios of the layers.
        residuals: Error-feedback residuals of the layers.
    """
    found = [
        not_finite(ratios, residuals), not_adapted(optimizer, ratios), drifted(ratios, grows=True),
        drifted(ratios, grows=False), bare_step(optimizer, ratios), pinned(optimizer, ratios), late(residuals),
        piling_up(residuals),
    ]  # fmt: skip
    return tuple(alarm for alarm in found if alarm is not None)


def not_finite(ratios: Sequence[RatioSeries], residuals: Sequence[ResidualSeries]) -> Alarm | None:
    """Return an alarm if a norm, a trust ratio or an error-feedback residual is NaN or infinite."""
    broken = {
        series.layer: (step, name, value)
        for series in ratios
        for name, column in (
            ("update norm", series.update_norm), ("weight norm", series.weight_norm), ("trust ratio", series.ratio),
        )
        for step, value in zip(series.steps, column, strict=True)
        if value is not None and not math.isfinite(value)
    }  # fmt: skip
    broken |= {
        series.layer: (step, "norm of the residual", value)
        for series in residuals
        for step, value in zip(series.steps, series.norm, strict=True)
        if not math.isfinite(value)
    }
    if not broken:
        return None
    layers = sorted(broken, key=lambda layer: broken[layer][0])
    step, name, value = broken[layers[0]]
    return Alarm(
        "not finite", tuple(layers), value,
        f"the {name} of {_named(layers)} is {value} at step {step}; lower the learning rate, or warm up longer",
    )  # fmt: skip


def not_adapted(optimizer: Optimizer | None, ratios: Sequence[RatioSeries]) -> Alarm | None:
    """Return an alarm if a layer-wise optimizer uses no trust ratio for any layer."""
    if (
        not ratios
        or any(series.is_adapted for series in ratios)
        or not (optimizer and optimizer.without_ratios)
    ):
        return None
    bare, _ = optimizer.without_ratios
    return Alarm(
        "not adapted", (), 0.0,
        f"none of the {len(ratios)} layers (for example {ratios[0].layer}) has a trust ratio, so {optimizer.name} "
        f"takes plain {bare} steps at lr={ratios[0].lr[-1]:.3g}; set weight_decay above 0, adapt_undecayed=True or "
        "exclude='none'",
    )  # fmt: skip


def drifted(ratios: Sequence[RatioSeries], *, grows: bool) -> Alarm | None:
    """Return an alarm if a layer's trust ratio changes by more than a factor of `DRIFT` during the run.

    The medians of the first and the last quarter of the sampled steps are compared. Steps in which the layer's weights
    or its ratio are zero are ignored.

    Args:
        ratios: Trust ratios of the layers.
        grows: Whether to check for growing ratios; if False, check for shrinking ones.
    """
    found = []
    for series in ratios:
        own = [
            r for r, w in zip(series.ratio, series.weight_norm, strict=True) if r and w and math.isfinite(r)
        ]
        if len(own) >= FEWEST_QUARTERS:
            first, *_, last = _quarters(own)
            found.append((last / first if grows else first / last, series.layer, first, last))
    worst, layers = _beyond(found, DRIFT)
    if worst is None:
        return None
    factor, _, first, last = worst
    way, why, out = _DRIFTS[grows]
    return Alarm(
        way, layers, factor,
        f"the trust ratio of {_named(layers)} went from {first:.3g} to {last:.3g}, {_times(factor)} as {why}; {out}",
    )  # fmt: skip


_DRIFTS = {
    True: (
        "exploding", "large: the layer's updates become smaller, but the ratio scales its steps back up",
        "let the learning rate decay (lr_schedule='cosine'), or bound the ratio with trust_clip=True",
    ),
    False: (
        "vanishing", "small: the layer's weights shrink, or its update grows",
        "lower weight_decay or the learning rate, or exclude the layer with exclude='1d' if it is a bias or a norm",
    ),
}  # fmt: skip


def bare_step(optimizer: Optimizer | None, ratios: Sequence[RatioSeries]) -> Alarm | None:
    """Return an alarm if a layer of zeros takes an unscaled step, and the learning rate exceeds `BARE_RATE`."""
    if not ratios or not (optimizer and optimizer.without_ratios):
        return None
    _, usual = optimizer.without_ratios
    found = [
        (lr / usual, series.layer, lr, step)
        for series in ratios
        for step, lr, ratio, weights, update in zip(
            series.steps, series.lr, series.ratio, series.weight_norm, series.update_norm, strict=True
        )
        if ratio is not None and weights == 0 and update
    ]
    worst, layers = _beyond(found, BARE_RATE)
    if worst is None:
        return None
    factor, _, lr, step = worst
    return Alarm(
        "bare step", layers, factor,
        f"the weights of {_named(layers)} are all 0 at step {step}, so the trust ratio is 1 and the step unscaled: "
        f"lr={lr:.3g} is {_times(factor)} the usual learning rate without trust ratios; warm up "
        "(lr_schedule.warmup_steps), or initialise the weights differently",
    )  # fmt: skip


def pinned(optimizer: Optimizer | None, ratios: Sequence[RatioSeries]) -> Alarm | None:
    """Return an alarm if a bound limits a layer's trust ratio in more than `PINNED_SHARE` of the sampled steps."""
    found = [
        (sum(bound is not None for bound in series.bound) / len(series.steps), series.layer, series)
        for series in ratios
        if len(series.steps) >= FEWEST_LOOKS
    ]
    worst, layers = _beyond(found, PINNED_SHARE)
    if worst is None:
        return None
    share, _, series = worst
    last = max(i for i, bound in enumerate(series.bound) if bound is not None)
    bound = str(series.bound[last])
    return Alarm(
        "pinned", layers, share,
        f"the trust ratio of {_named(layers)} is limited by {bound} in {share:.0%} of the sampled steps (ratio "
        f"{series.ratio[last]:.3g} at step {series.steps[last]}); {_advice(optimizer, bound)}",
    )  # fmt: skip


def _advice(optimizer: Optimizer | None, bound: str) -> str:
    return (optimizer.advice if optimizer else {}).get(bound, "relax this bound")


def late(residuals: Sequence[ResidualSeries]) -> Alarm | None:
    """Return an alarm if the residual of a layer with a large gradient is too large (see `LATE`)."""
    found = [
        (_quarters(relative)[-1], series.layer, series.kind)
        for series in carrying(residuals)
        if len(relative := [value for value in series.relative if value is not None]) >= FEWEST_LOOKS
    ]
    worst, layers = _beyond(found, LATE)
    if worst is None:
        return None
    times, _, kind = worst
    return Alarm(
        "late", layers, times,
        f"the residual of {_named(layers)} (kind {kind!r}) has {times:.3g} times the norm of one step's gradient, so "
        f"the values that are sent are about {times:.3g} steps old; send more (a larger ratio or rank, more bits), or "
        "lower the learning rate",
    )  # fmt: skip


def piling_up(residuals: Sequence[ResidualSeries]) -> Alarm | None:
    """Return an alarm if the residual of a layer with a large gradient keeps growing (see `PILES_UP`)."""
    found = []
    for series in carrying(residuals):
        relative = [value for value in series.relative if value is not None]
        if len(relative) >= FEWEST_QUARTERS and _quarters(relative)[-1] > 1:
            _, second, third, last = _quarters(series.norm)
            if second < third < last:
                found.append((last / second if second else math.inf, series.layer, second, last))
    worst, layers = _beyond(found, PILES_UP)
    if worst is None:
        return None
    times, _, before, now = worst
    return Alarm(
        "piling up", layers, times,
        f"the norm of the residual of {_named(layers)} keeps growing, from {before:.3g} in the second quarter of the "
        f"run to {now:.3g} in the last; send more (a larger ratio or rank, more bits), or lower the learning rate",
    )  # fmt: skip


def carrying(residuals: Sequence[ResidualSeries]) -> list[ResidualSeries]:
    """Return the residuals of layers whose gradient norm is at least `CARRIES` times the norm over all layers.

    The norm over all layers is computed separately for each kind of residual.
    """
    totals: dict[str, float] = {}
    for series in residuals:
        totals[series.kind] = math.hypot(totals.get(series.kind, 0.0), fmean(series.gradient))
    return [s for s in residuals if fmean(s.gradient) >= CARRIES * totals[s.kind]]


def _quarters(values: Sequence[float]) -> list[float]:
    """Return the medians of the four quarters of `values`; the last quarter includes the remainder."""
    size = len(values) // 4
    return [median(values[i * size : (i + 1) * size if i < 3 else None]) for i in range(4)]


def _beyond(
    found: Iterable[tuple[Any, ...]], threshold: float
) -> tuple[tuple[Any, ...] | None, tuple[str, ...]]:
    """Select the rows with a value above the threshold; return the row with the largest value, and all their layers.

    If no value is above the threshold, return None and an empty tuple. Each row starts with the value to compare and
    the name of the layer.
    """
    rows = sorted((row for row in found if row[0] > threshold), key=lambda row: -row[0])
    return (rows[0] if rows else None), tuple(dict.fromkeys(row[1] for row in rows))


def _named(layers: Iterable[str]) -> str:
    first, *others = layers
    return first if not others else f"{first} (and {len(others)} more)"


def _times(factor: float) -> str:
    return f"{factor:.3g} times"
