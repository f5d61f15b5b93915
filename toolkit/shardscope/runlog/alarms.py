"""Alarms about a run's layers: rules over the series of trust ratios and error-feedback residuals.

Each rule is a pure function that returns one `Alarm` or None. The alarm is about the worst layer; others are counted.
The reason for each threshold is given with it. "Measured" there refers to 20 runs of `mlp` on `digits` and of
`gpt-nano` on text (80 to 400 steps, 2 ranks, seed 0), with several variants of LAMB and LARS and twelve compression
methods.
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
"""Fraction of steps with a clipped ratio beyond which the bound, not the layer, determines the ratio."""
FEWEST_LOOKS = 4
"""Minimum number of sampled steps for which a fraction of them is meaningful."""
BARE_RATE = 10.0
"""Multiple of the default rate of the optimizer without ratios (AdamW 1e-3, SGD 0.1) above which an unscaled step is
reported. A layer of zeros has trust ratio 1, so its step is unscaled, at a learning rate meant for scaled steps. Ten
times the default rate is far above the rates used with that optimizer."""
DRIFT = 100.0
"""Factor by which a ratio grows or shrinks from the first quarter of the run to the last. In healthy measured runs it
grew by a factor of 0.8 to 21, and with 1-bit LAMB by up to 51."""
FEWEST_QUARTERS = 8
"""Minimum number of sampled steps for which quarters are compared."""
LATE = 10.0
"""Residual of a layer in the last quarter of the run, as a multiple of one step's gradient. It is about the age, in
steps, of the values sent. Of the measured runs, seven were above this threshold, and five of these ended ten points of
accuracy or more below the uncompressed run. Of the other runs, one did."""
PILES_UP = 2.0
"""Factor by which a layer's residual grows from the second quarter to the last, if it also rises in between and ends
above one gradient. If error feedback keeps up, the residual settles: it grew by at most 1.4. If nothing is ever sent,
it grows linearly with the steps, by 2.3. In two runs that diverged it grew by factors of 16 and 18."""
CARRIES = 0.1
"""Fraction of the norm of all gradients. Layers below it, mostly biases, can be sent late with little harm."""


@dataclass(frozen=True)
class Alarm:
    """One alarm.

    Attributes:
        kind: ``not finite``, ``not adapted``, ``exploding``, ``vanishing``, ``bare step``, ``pinned``, ``late`` or
            ``piling up``.
        layers: Layers concerned, the worst first; empty if all are.
        value: Value of the worst layer that exceeds the threshold.
        text: One sentence with a remedy.
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
    """Return all alarms for these series, the most severe kinds first.

    Args:
        optimizer: Optimizer of the run; None if it is not known.
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
    """Alarm if a norm, a ratio or an error-feedback residual is NaN or infinite."""
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
    """Alarm if a layer-wise optimizer has no trust ratio for any layer."""
    if (
        not ratios
        or any(series.is_adapted for series in ratios)
        or not (optimizer and optimizer.without_ratios)
    ):
        return None
    bare, _ = optimizer.without_ratios
    return Alarm(
        "not adapted", (), 0.0,
        f"none of the {len(ratios)} layers, {ratios[0].layer} the first, has a trust ratio, so {optimizer.name} takes "
        f"bare {bare} steps at lr={ratios[0].lr[-1]:.3g}; give it a weight_decay above 0, adapt_undecayed=True or "
        "exclude='none'",
    )  # fmt: skip


def drifted(ratios: Sequence[RatioSeries], *, grows: bool) -> Alarm | None:
    """Alarm if a ratio has grown, or shrunk, by more than `DRIFT`. Steps at which the weights are zero are ignored."""
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
        "exploding", "large: its updates shrink, and its steps do not",
        "let the learning rate fall (lr_schedule='cosine'), or bound it with trust_clip=True",
    ),
    False: (
        "vanishing", "small: its weights shrink, or its updates grow",
        "lower weight_decay or the learning rate, or leave it out with exclude='1d' if it is a bias or a norm",
    ),
}  # fmt: skip


def bare_step(optimizer: Optimizer | None, ratios: Sequence[RatioSeries]) -> Alarm | None:
    """Alarm if a layer of zeros takes an unscaled step at more than `BARE_RATE` times the usual unscaled rate."""
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
        f"the weights of {_named(layers)} are 0 at step {step}, so there the ratio is 1 and lr={lr:.3g} acts unscaled, "
        f"{_times(factor)} as large as is usual without ratios; warm up (lr_schedule.warmup_steps), or start from "
        "other weights",
    )  # fmt: skip


def pinned(optimizer: Optimizer | None, ratios: Sequence[RatioSeries]) -> Alarm | None:
    """Alarm if a bound clips a ratio at more than `PINNED_SHARE` of the sampled steps."""
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
        f"the trust ratio of {_named(layers)} is held at a bound by {bound} at {share:.0%} of the sampled steps, "
        f"{series.ratio[last]:.3g} at step {series.steps[last]}; {_advice(optimizer, bound)}",
    )  # fmt: skip


def _advice(optimizer: Optimizer | None, bound: str) -> str:
    return (optimizer.advice if optimizer else {}).get(bound, "loosen it")


def late(residuals: Sequence[ResidualSeries]) -> Alarm | None:
    """Alarm if the residual of a layer with a large gradient exceeds `LATE` times the gradient of one step."""
    found = [
        (_quarters(relative)[-1], series.layer, series.kind)
        for series in _carrying(residuals)
        if len(relative := [value for value in series.relative if value is not None]) >= FEWEST_LOOKS
    ]
    worst, layers = _beyond(found, LATE)
    if worst is None:
        return None
    times, _, kind = worst
    return Alarm(
        "late", layers, times,
        f"the residual of {_named(layers)} is {times:.3g} times the gradient of a step ({kind}), so what is sent is "
        "about as many steps old; send more (a larger ratio or rank, more bits), or lower the learning rate",
    )  # fmt: skip


def piling_up(residuals: Sequence[ResidualSeries]) -> Alarm | None:
    """Alarm if the residual of a layer with a large gradient keeps growing."""
    found = []
    for series in _carrying(residuals):
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
        f"the residual of {_named(layers)} keeps growing, from {before:.3g} to {now:.3g} since the run's second "
        "quarter; send more (a larger ratio or rank, more bits), or lower the learning rate",
    )  # fmt: skip


def _carrying(residuals: Sequence[ResidualSeries]) -> list[ResidualSeries]:
    """Return the series whose mean gradient norm is at least `CARRIES` times that of all series of their kind."""
    totals: dict[str, float] = {}
    for series in residuals:
        totals[series.kind] = math.hypot(totals.get(series.kind, 0.0), fmean(series.gradient))
    return [s for s in residuals if fmean(s.gradient) >= CARRIES * totals[s.kind]]


def _quarters(values: Sequence[float]) -> list[float]:
    """Return the medians of the four quarters; the last quarter includes the remainder."""
    size = len(values) // 4
    return [median(values[i * size : (i + 1) * size if i < 3 else None]) for i in range(4)]


def _beyond(
    found: Iterable[tuple[Any, ...]], threshold: float
) -> tuple[tuple[Any, ...] | None, tuple[str, ...]]:
    """Return the row farthest beyond the threshold, and all layers beyond it.

    Rows start with the value to compare and the layer.
    """
    rows = sorted((row for row in found if row[0] > threshold), key=lambda row: -row[0])
    return (rows[0] if rows else None), tuple(dict.fromkeys(row[1] for row in rows))


def _named(layers: Iterable[str]) -> str:
    first, *others = layers
    return first if not others else f"{first} (and {len(others)} more)"


def _times(factor: float) -> str:
    return f"{factor:.3g} times"
