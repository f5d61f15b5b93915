"""What is wrong with a run's layers: rules over the series of their trust ratios and of what compression owes.

Each rule is a pure function that gives one `Alarm` or None, about the layer that it is worst for; others are counted.
What a threshold was set by is beside it. "Measured" there means 20 runs of `mlp` on `digits` and of `gpt-nano` on text
(80 to 400 steps, 2 ranks, seed 0), with LAMB and LARS of several variants and twelve methods of compression.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from shardscope.spec.optimizer import Optimizer

if TYPE_CHECKING:
    from shardscope.runtime.layers import OwedSeries, RatioSeries

PINNED_SHARE = 0.5
"""A ratio that is held down more often than this is no longer the layer's own."""
FEWEST_LOOKS = 4
"""Steps looked at before a share of them means anything."""
BARE_RATE = 10.0
"""A layer of zeros has no ratio, so it takes a bare step at a rate meant for scaled ones. Ten times the default rate of
the rule without ratios (AdamW 1e-3, SGD 0.1) is far beyond what that rule is used with."""
DRIFT = 100.0
"""Times that a ratio has grown or shrunk, from the first quarter of the run to its last. In healthy runs measured it
grew 0.8 to 21 times, under 1-bit LAMB up to 51."""
FEWEST_QUARTERS = 8
"""Steps looked at before quarters of them are compared."""
LATE = 10.0
"""Gradients of one step that a layer is owed, in the last quarter of the run: about so old is what is sent of it. Of
the runs measured seven were above, and five of them ended ten points of accuracy or more below the uncompressed run; of
the others one did."""
PILES_UP = 2.0
"""Times that what a layer is owed has grown from the second quarter to the last, rising in between, when it is more
than one gradient. Error feedback that keeps up settles: it grew at most 1.4 times then. Where nothing is ever sent it
grows with the steps, 2.3 times; in two runs that diverged it grew 16 and 18 times."""
CARRIES = 0.1
"""Of the norm of all gradients: layers below that, mostly biases, may wait long for their turn at little harm."""


@dataclass(frozen=True)
class Alarm:
    """Something that is wrong.

    Attributes:
        kind: ``not finite``, ``not adapted``, ``exploding``, ``vanishing``, ``bare step``, ``pinned``, ``late`` or
            ``piling up``.
        layers: Whom it concerns, the worst first; empty where it is all.
        value: What is beyond its threshold, for the worst of them.
        text: One sentence, with the way out.
    """

    kind: str
    layers: tuple[str, ...]
    value: float
    text: str

    def __str__(self) -> str:
        return self.text


def alarms_of(
    optimizer: Optimizer | None, ratios: Sequence[RatioSeries], owed: Sequence[OwedSeries]
) -> tuple[Alarm, ...]:
    """All that these series give cause for; the gravest kinds first."""
    found = [
        not_finite(ratios, owed), not_adapted(optimizer, ratios), drifted(ratios, grows=True),
        drifted(ratios, grows=False), bare_step(optimizer, ratios), pinned(optimizer, ratios), late(owed),
        piling_up(owed),
    ]  # fmt: skip
    return tuple(alarm for alarm in found if alarm is not None)


def not_finite(ratios: Sequence[RatioSeries], owed: Sequence[OwedSeries]) -> Alarm | None:
    """A norm, a ratio or an error-feedback residual that is NaN or infinite."""
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
        series.layer: (step, "norm of what is owed", value)
        for series in owed
        for step, value in zip(series.steps, series.owed, strict=True)
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
    """A layer-wise optimizer without a single trust ratio."""
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
    """A ratio that has grown, or shrunk, by `DRIFT`; steps from weights of zero, which have none, left out."""
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
    """A layer of zeros that takes a step at `BARE_RATE` times the rate that such steps are usually taken with."""
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
    """A ratio that a bound holds down at most of the steps."""
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
        f"the trust ratio of {_named(layers)} is held at a bound by {bound} at {share:.0%} of the steps looked at, "
        f"{series.ratio[last]:.3g} at step {series.steps[last]}; {_advice(optimizer, bound)}",
    )  # fmt: skip


def _advice(optimizer: Optimizer | None, bound: str) -> str:
    return (optimizer.advice if optimizer else {}).get(bound, "loosen it")


def late(owed: Sequence[OwedSeries]) -> Alarm | None:
    """Layers that matter and are owed more than `LATE` gradients."""
    found = [
        (_quarters(relative)[-1], series.layer, series.kind)
        for series in _carrying(owed)
        if len(relative := [value for value in series.relative if value is not None]) >= FEWEST_LOOKS
    ]
    worst, layers = _beyond(found, LATE)
    if worst is None:
        return None
    times, _, kind = worst
    return Alarm(
        "late", layers, times,
        f"compression owes {_named(layers)} {times:.3g} times the gradient of a step ({kind}), so what it sends is "
        "about as many steps old; send more (a larger ratio or rank, more bits), or lower the learning rate",
    )  # fmt: skip


def piling_up(owed: Sequence[OwedSeries]) -> Alarm | None:
    """Layers that matter and are owed ever more."""
    found = []
    for series in _carrying(owed):
        relative = [value for value in series.relative if value is not None]
        if len(relative) >= FEWEST_QUARTERS and _quarters(relative)[-1] > 1:
            _, second, third, last = _quarters(series.owed)
            if second < third < last:
                found.append((last / second if second else math.inf, series.layer, second, last))
    worst, layers = _beyond(found, PILES_UP)
    if worst is None:
        return None
    times, _, before, now = worst
    return Alarm(
        "piling up", layers, times,
        f"what compression owes {_named(layers)} keeps growing, from {before:.3g} to {now:.3g} since the run's second "
        "quarter; send more (a larger ratio or rank, more bits), or lower the learning rate",
    )  # fmt: skip


def _carrying(owed: Sequence[OwedSeries]) -> list[OwedSeries]:
    """The series with at least `CARRIES` of the gradients of their kind, in the mean over steps."""
    totals: dict[str, float] = {}
    for series in owed:
        totals[series.kind] = math.hypot(totals.get(series.kind, 0.0), fmean(series.gradient))
    return [s for s in owed if fmean(s.gradient) >= CARRIES * totals[s.kind]]


def _quarters(values: Sequence[float]) -> list[float]:
    """Medians of the four quarters; the last has what is left over."""
    size = len(values) // 4
    return [median(values[i * size : (i + 1) * size if i < 3 else None]) for i in range(4)]


def _beyond(
    found: Iterable[tuple[Any, ...]], threshold: float
) -> tuple[tuple[Any, ...] | None, tuple[str, ...]]:
    """Of rows that begin with a size and a layer: the one farthest beyond the threshold, and all layers beyond it."""
    rows = sorted((row for row in found if row[0] > threshold), key=lambda row: -row[0])
    return (rows[0] if rows else None), tuple(dict.fromkeys(row[1] for row in rows))


def _named(layers: Iterable[str]) -> str:
    first, *others = layers
    return first if not others else f"{first} (and {len(others)} more)"


def _times(factor: float) -> str:
    return f"{factor:.3g} times"
