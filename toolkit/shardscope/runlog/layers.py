"""Statistics of a run's layers: trust ratios, norms, and the residuals of compression with error feedback.

The number of samples in memory is limited. As a run continues, only every second sample stays in memory, then every
fourth, and so on, so that the samples remain spread evenly over the run. Some samples are never dropped: the first and
the newest sample, the first with a NaN or infinite value, and, among samples with a layer of zeros, the one with the
largest learning rate. Each of the last two is enough to raise an alarm. `Layers.alarms` is computed from the samples in
memory only, so every reader of a run gets the same alarms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from shardscope.runlog.alarms import Alarm, alarms_of
from shardscope.spec import Job, Optimizer

Values = tuple[float, ...]
Known = tuple[float | None, ...]


@dataclass(frozen=True)
class RatioSeries:
    """Trust ratios and norms of one layer under a layer-wise optimizer, with one value for each sampled step.

    Attributes:
        layer: Name of the parameter.
        steps: Step numbers of the samples.
        lr: Learning rate.
        ratio: Trust ratio; None in steps without one.
        weight_norm: Norm of the weights before the step; None if the optimizer did not compute it.
        update_norm: Norm in the denominator of the trust ratio: the norm of LAMB's update, or of LARS's
            gradient plus weight decay.
        bound: The bound that limited the ratio, ``clamp``, ``trust_clip`` or ``factor``; None if none did.
    """

    layer: str
    steps: tuple[int, ...]
    lr: Values
    ratio: Known
    weight_norm: Known
    update_norm: Known
    bound: tuple[str | None, ...]

    @property
    def is_adapted(self) -> bool:
        """Whether the layer has a trust ratio in at least one sampled step."""
        return any(value is not None for value in self.ratio)


@dataclass(frozen=True)
class ResidualSeries:
    """Error-feedback residual of one tensor or sharding unit, with one value for each sampled step.

    Attributes:
        layer: Name of the tensor or unit.
        kind: Source of the residual: the compression of the ranks' own gradients (``residual``), the compression of
            each rank's share of the mean (``share``), or deep gradient compression (``unsent``).
        steps: Step numbers of the samples.
        norm: Norm of the residual after the step.
        gradient: Norm of the gradient that the step added to the residual, in the same units as `norm`.
    """

    layer: str
    kind: str
    steps: tuple[int, ...]
    norm: Values
    gradient: Values

    @property
    def relative(self) -> Known:
        """Residual norm divided by the gradient norm of the step; None where the gradient is zero."""
        pairs = zip(self.norm, self.gradient, strict=True)
        return tuple(norm / gradient if gradient else None for norm, gradient in pairs)


if TYPE_CHECKING:
    import pandas as pd


Event = Mapping[str, Any]
_RATIO_COLUMNS = ("ratio", "weight_norm", "update_norm")


@dataclass(frozen=True)
class Layers:
    """Layer statistics of a run at the sampled steps; empty until a step has been sampled.

    Attributes:
        optimizer: The run's optimizer.
        ratios: One series per layer, in the model's order, if the optimizer is layer-wise.
        residuals: One series for each tensor or sharding unit and kind of residual, if gradients are compressed with
            error feedback.
        alarms: Alarms raised by the rules of `shardscope.runlog.alarms`, the most severe kinds first.
    """

    optimizer: Optimizer | None
    ratios: tuple[RatioSeries, ...]
    residuals: tuple[ResidualSeries, ...]
    alarms: tuple[Alarm, ...] = ()

    @property
    def frame(self) -> pd.DataFrame:
        """Data frame by layer and step, with columns layer, step, lr, ratio, weight_norm, update_norm and bound."""
        return _frame(("layer", "steps", "lr", *_RATIO_COLUMNS, "bound"), self.ratios)

    @property
    def residual_frame(self) -> pd.DataFrame:
        """Data frame by layer, kind and step, with columns layer, kind, step, norm, gradient and relative."""
        return _frame(("layer", "kind", "steps", "norm", "gradient", "relative"), self.residuals)

    def __repr__(self) -> str:
        if not self.ratios and not self.residuals:
            return "<Layers: no step has been sampled yet>"
        told = [f"{len(self.ratios)} with trust ratios"] * bool(self.ratios)
        told += [f"{len(self.residuals)} with residuals"] * bool(self.residuals)
        alarms = self.alarms
        return f"<Layers: {' and '.join(told)}; {len(alarms) or 'no'} alarm{'s' * (len(alarms) != 1)}>"


def _frame(columns: tuple[str, ...], series: Iterable[Any]) -> pd.DataFrame:
    import pandas as pd

    rows = [
        tuple(value if isinstance(value, str) else value[i] for value in values)
        for one in series
        for values in [[getattr(one, column) for column in columns]]
        for i in range(len(one.steps))
    ]
    return pd.DataFrame(rows, columns=[{"steps": "step"}.get(column, column) for column in columns])


def reports_layers(job: Job) -> bool:
    """Return whether layers have statistics: with a layer-wise optimizer, or compression that keeps residuals."""
    return job.optimizer.is_layerwise() or keeps_residuals(job)


def keeps_residuals(job: Job) -> bool:
    """Return whether the job's compression uses error feedback, and so keeps residuals."""
    return job.compression.remembers


def layers_of(events: Iterable[Event], optimizer: Optimizer | None) -> Layers:
    """Compute the layer statistics of a run from its layer events.

    If each rank has its own weights (gossip, local SGD), ratios and norms are means over ranks, and a ratio counts as
    limited by a bound if it was limited on any rank. The norms of residuals and of their gradients are computed over
    all ranks together.

    Args:
        events: Events of the run; only layer events are used.
        optimizer: The run's optimizer; None if unknown.
    """
    samples, rows = LayerSamples(), [event for event in events if event["event"] == "layers"]
    for event in rows:
        samples.take(event)
    return Layers(optimizer, *_series(rows), samples.layers(optimizer).alarms)


def _series(events: Iterable[Event]) -> tuple[tuple[RatioSeries, ...], tuple[ResidualSeries, ...]]:
    newest = {(event["step"], event["rank"]): event for event in events}
    by_step: dict[int, list[Event]] = {}
    for (step, _), event in sorted(newest.items()):
        by_step.setdefault(step, []).append(event)
    return _ratios(by_step), _residuals(by_step)


def _ratios(by_step: Mapping[int, list[Event]]) -> tuple[RatioSeries, ...]:
    found: dict[str, list[tuple[Any, ...]]] = {}
    for step, events in by_step.items():
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for event in events:
            columns = [event[name] for name in (*_RATIO_COLUMNS, "bound")]
            for layer, *row in zip(event["layer"], *columns, strict=True):
                rows.setdefault(str(layer), []).append((float(event["lr"]), *row))
        for layer, held in rows.items():
            found.setdefault(layer, []).append((step, *_mean_row(held)))
    return tuple(RatioSeries(layer, *zip(*rows, strict=True)) for layer, rows in found.items())


def _mean_row(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    lr, *norms, bounds = zip(*rows, strict=True)
    return fmean(lr), *map(_mean, norms), next((bound for bound in bounds if bound), None)


def _mean(values: Iterable[Any]) -> float | None:
    told = [float(value) for value in values if value is not None]
    return fmean(told) if told else None


def _residuals(by_step: Mapping[int, list[Event]]) -> tuple[ResidualSeries, ...]:
    found: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for step, events in by_step.items():
        rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for kind, layer, norm, gradient in (row for event in events for row in event["owed"]):
            rows.setdefault((layer, kind), []).append((float(norm), float(gradient)))
        for key, pairs in rows.items():
            norm, gradient = (math.hypot(*column) for column in zip(*pairs, strict=True))
            found.setdefault(key, []).append((step, norm, gradient))
    return tuple(ResidualSeries(*key, *zip(*rows, strict=True)) for key, rows in found.items())


MOST_SAMPLES = 240
"""Maximum number of sampled steps in memory."""


@dataclass
class LayerSamples:
    """Layer events of all ranks at a limited number of steps; some steps are dropped as new events arrive.

    Attributes:
        num_samples: Number of steps sampled so far, including dropped ones.
        num_events: Number of events received so far.
    """

    num_samples: int = 0
    num_events: int = 0
    _kept: dict[int, dict[int, Event]] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    """Index of each step in memory among all sampled steps, from 0."""
    _every: int = 1
    _newest: int = -1
    _broken: int | None = None
    _bare: tuple[float, int] | None = None
    """Largest learning rate among the steps with a layer of zeros, and the number of that step."""

    def take(self, event: Event) -> None:
        """Add a layer event of one rank."""
        self.num_events += 1
        step = event["step"]
        if step > self._newest:
            self._begin(step)
        if step not in self._kept:
            return  # the step was dropped before this rank reported it
        self._kept[step][event["rank"]] = event
        if self._broken is None and not _is_finite(event):
            self._broken = step
        lr = float(event["lr"])
        if _is_bare(event) and math.isfinite(lr) and (self._bare is None or lr > self._bare[0]):
            self._bare = lr, step

    def layers(self, optimizer: Optimizer | None) -> Layers:
        """Return the layer statistics computed from the samples in memory."""
        ratios, residuals = _series(event for ranks in self._kept.values() for event in ranks.values())
        return Layers(optimizer, ratios, residuals, alarms_of(optimizer, ratios, residuals))

    def _begin(self, step: int) -> None:
        before, self._newest = self._newest, step
        self._kept[step], self._places[step] = {}, self.num_samples
        self.num_samples += 1
        self._drop([before])
        while len(self._kept) > MOST_SAMPLES:
            self._every *= 2
            self._drop(list(self._kept))

    def _drop(self, steps: Iterable[int]) -> None:
        always = (self._newest, self._broken, self._bare and self._bare[1])
        for step in steps:
            if step not in always and self._places.get(step, 0) % self._every:
                del self._kept[step], self._places[step]


def _is_bare(event: Event) -> bool:
    """Return whether, in this event, a layer of zeros takes a step with trust ratio 1."""
    columns = [event[name] for name in _RATIO_COLUMNS]
    return any(
        ratio is not None and norm == 0 and update for ratio, norm, update in zip(*columns, strict=True)
    )


def _is_finite(event: Event) -> bool:
    columns: list[Iterable[Any]] = [event[name] for name in _RATIO_COLUMNS]
    residuals = (row[2] for row in event["owed"])
    return all(math.isfinite(sum(map(float, filter(None, column)))) for column in (*columns, residuals))
