"""Statistics of a run's layers: trust ratios, norms, and the residuals of compression with error feedback.

Samples are kept in bounded memory while the run continues. As their number grows, only every second, then every fourth
and so on is kept, evenly over the whole run. The first sample, the newest, and the first with a NaN or infinite value
are always kept, so that `runlog.alarms` finds the same alarms as with all samples.
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
    """Trust ratios and norms of one layer with a layer-wise optimizer, by step.

    Attributes:
        layer: Name of the parameter.
        steps: Numbers of the sampled steps.
        lr: Learning rate at each of them.
        ratio: Trust ratio; None where the layer is not adapted.
        weight_norm: Norm of the weights before the step; None where the optimizer did not compute it.
        update_norm: Norm in the ratio's denominator: of LAMB's update, or of LARS's gradient with weight decay.
        bound: The setting that clipped the ratio, ``clamp``, ``trust_clip`` or ``factor``; None where none did.
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
        """Whether the layer has a trust ratio at any step."""
        return any(value is not None for value in self.ratio)


@dataclass(frozen=True)
class ResidualSeries:
    """Error-feedback residual of one tensor or sharding unit, by step.

    Attributes:
        layer: Name of the tensor or unit.
        kind: ``residual`` (of the ranks' own gradients), ``share`` (of the mean), or ``unsent`` (deep gradient
            compression).
        steps: Numbers of the sampled steps.
        norm: Norm of the residual that is left to be sent after the step.
        gradient: Norm of the gradient that the step added, in the same units.
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
    """

    optimizer: Optimizer | None
    ratios: tuple[RatioSeries, ...]
    residuals: tuple[ResidualSeries, ...]

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Alarms raised by the rules of `shardscope.runlog.alarms`, the most severe kinds first."""
        return alarms_of(self.optimizer, self.ratios, self.residuals)

    @property
    def frame(self) -> pd.DataFrame:
        """Data frame with one row for each layer and step: layer, step, lr, ratio, weight_norm, update_norm, bound."""
        return _frame(("layer", "steps", "lr", *_RATIO_COLUMNS, "bound"), self.ratios)

    @property
    def residual_frame(self) -> pd.DataFrame:
        """Data frame with one row for each layer, kind and step: layer, kind, step, norm, gradient, relative."""
        return _frame(("layer", "kind", "steps", "norm", "gradient", "relative"), self.residuals)

    def __repr__(self) -> str:
        if not self.ratios and not self.residuals:
            return "<Layers: no step has been sampled yet>"
        told = [f"trust ratios of {len(self.ratios)}"] * bool(self.ratios)
        told += [f"residuals of {len(self.residuals)}"] * bool(self.residuals)
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
    """Return whether the job has layer statistics: a layer-wise optimizer, or compression with residuals."""
    return job.optimizer.is_layerwise() or keeps_residuals(job)


def keeps_residuals(job: Job) -> bool:
    """Return whether the job's compression keeps a residual of what it has not sent."""
    return job.compression.remembers


def layers_of(events: Iterable[Event], optimizer: Optimizer | None) -> Layers:
    """Return the layer statistics from a run's events; other kinds of events are ignored.

    If each rank has its own weights (gossip, local SGD), ratios and norms are means over ranks, and a ratio counts as
    clipped if it was clipped on any rank. The norms of residuals and of gradients are each combined over all ranks into
    one norm.

    Args:
        events: Events of the run.
        optimizer: The run's optimizer; None if it is not known.
    """
    newest = {(event["step"], event["rank"]): event for event in events if event["event"] == "layers"}
    by_step: dict[int, list[Event]] = {}
    for (step, _), event in sorted(newest.items()):
        by_step.setdefault(step, []).append(event)
    return Layers(optimizer, _ratios(by_step), _residuals(by_step))


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
"""Maximum number of samples kept at a time."""


@dataclass
class LayerSamples:
    """Layer events of all ranks, thinned as they arrive.

    Attributes:
        num_samples: Number of steps sampled so far, kept or not.
        num_events: Number of events received so far.
    """

    num_samples: int = 0
    num_events: int = 0
    _kept: dict[int, dict[int, Event]] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    """Index of each kept step among all sampled steps, from 0."""
    _every: int = 1
    _newest: int = -1
    _broken: int | None = None

    def take(self, event: Event) -> None:
        """Add the event of one rank."""
        self.num_events += 1
        step = event["step"]
        if step > self._newest:
            self._begin(step)
        if step not in self._kept:
            return  # the step was dropped before this rank reported it
        self._kept[step][event["rank"]] = event
        if self._broken is None and not _is_finite(event):
            self._broken = step

    def layers(self, optimizer: Optimizer | None) -> Layers:
        """Return the layer statistics from the samples that are kept."""
        return layers_of((event for ranks in self._kept.values() for event in ranks.values()), optimizer)

    def _begin(self, step: int) -> None:
        before, self._newest = self._newest, step
        self._kept[step], self._places[step] = {}, self.num_samples
        self.num_samples += 1
        self._drop([before])
        while len(self._kept) > MOST_SAMPLES:
            self._every *= 2
            self._drop(list(self._kept))

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            if step not in (self._newest, self._broken) and self._places.get(step, 0) % self._every:
                del self._kept[step], self._places[step]


def _is_finite(event: Event) -> bool:
    columns: list[Iterable[Any]] = [event[name] for name in _RATIO_COLUMNS]
    residuals = (row[2] for row in event["owed"])
    return all(math.isfinite(sum(map(float, filter(None, column)))) for column in (*columns, residuals))
