"""What happened to the layers of a run: trust ratios, norms, and what compression with error feedback owes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from shardscope.errors import SpecError
from shardscope.runtime.alarms import Alarm, alarms_of
from shardscope.runtime.layer_series import OwedSeries, RatioSeries
from shardscope.runtime.summary import number
from shardscope.spec import Job, Optimizer

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.runtime.run import Run

Event = Mapping[str, Any]
_RATIO_COLUMNS = ("ratio", "weight_norm", "update_norm")


@dataclass(frozen=True)
class Layers:
    """The layers of a run at the steps at which they were looked at; empty before the first.

    Attributes:
        optimizer: The run's.
        ratios: One series a layer, in the model's order, where the optimizer is layer-wise.
        owed: One series for each tensor or unit of sharding, and kind of debt, where gradients are compressed with
            error feedback.
    """

    optimizer: Optimizer | None
    ratios: tuple[RatioSeries, ...]
    owed: tuple[OwedSeries, ...]

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What is wrong with them, by the rules of `shardscope.runtime.alarms`; the worst kinds first."""
        return alarms_of(self.optimizer, self.ratios, self.owed)

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each layer and step: layer, step, lr, ratio, weight_norm, update_norm, bound."""
        return _frame(("layer", "steps", "lr", *_RATIO_COLUMNS, "bound"), self.ratios)

    @property
    def owed_frame(self) -> pd.DataFrame:
        """One row for each layer, kind and step: layer, kind, step, owed, gradient, relative."""
        return _frame(("layer", "kind", "steps", "owed", "gradient", "relative"), self.owed)

    def __repr__(self) -> str:
        if not self.ratios and not self.owed:
            return "<Layers: no step has been looked at yet>"
        told = [f"trust ratios of {len(self.ratios)}"] * bool(self.ratios)
        told += [f"what {len(self.owed)} owe"] * bool(self.owed)
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


def tells_of_layers(job: Job) -> bool:
    """Whether there is anything to tell: a layer-wise optimizer, or compression that owes."""
    return job.optimizer.is_layerwise() or owes(job)


def owes(job: Job) -> bool:
    """Whether the job's compression remembers what it has not sent."""
    return job.compression.remembers


def layers_of(events: Iterable[Event], optimizer: Optimizer | None) -> Layers:
    """The layers as a run's events tell of them; events of other kinds are passed over.

    Where ranks have weights of their own (gossip, local SGD), ratios and norms are means over ranks, and a ratio counts
    as held down if any is. What ranks owe is the norm of all of it together, beside that of all their gradients.
    """
    newest = {(event["step"], event["rank"]): event for event in events if event["event"] == "layers"}
    by_step: dict[int, list[Event]] = {}
    for (step, _), event in sorted(newest.items()):
        by_step.setdefault(step, []).append(event)
    return Layers(optimizer, _ratios(by_step), _owed(by_step))


def _ratios(by_step: Mapping[int, list[Event]]) -> tuple[RatioSeries, ...]:
    found: dict[str, list[tuple[Any, ...]]] = {}
    for step, events in by_step.items():
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for event in events:
            columns = [event[name] for name in (*_RATIO_COLUMNS, "bound")]
            for layer, *row in zip(event["layer"], *columns, strict=True):
                rows.setdefault(str(layer), []).append((number(event["lr"]), *row))
        for layer, held in rows.items():
            found.setdefault(layer, []).append((step, *_mean_row(held)))
    return tuple(RatioSeries(layer, *zip(*rows, strict=True)) for layer, rows in found.items())


def _mean_row(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    lr, *norms, bounds = zip(*rows, strict=True)
    return fmean(lr), *map(_mean, norms), next((bound for bound in bounds if bound), None)


def _mean(values: Iterable[Any]) -> float | None:
    told = [number(value) for value in values if value is not None]
    return fmean(told) if told else None


def _owed(by_step: Mapping[int, list[Event]]) -> tuple[OwedSeries, ...]:
    found: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for step, events in by_step.items():
        rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for kind, layer, owed, gradient in (row for event in events for row in event["owed"]):
            rows.setdefault((layer, kind), []).append((number(owed), number(gradient)))
        for key, pairs in rows.items():
            owed, gradient = (math.hypot(*column) for column in zip(*pairs, strict=True))
            found.setdefault(key, []).append((step, owed, gradient))
    return tuple(OwedSeries(*key, *zip(*rows, strict=True)) for key, rows in found.items())


def layers_of_run(run: Run) -> Layers:
    """What `Run.layers` gives.

    Raises:
        SpecError: The run has nothing to tell of its layers, or was told not to.
    """
    job = run.job
    if not tells_of_layers(job):
        raise SpecError(
            f"run {run.id} has no trust ratios with optimizer={job.optimizer.name!r} and owes nothing with "
            f"compression={job.compression.name!r}; use lamb or lars, or compression with error feedback"
        )
    if not job.record.layers_every:
        raise SpecError(
            f"run {run.id} does not look at its layers; launch it with record=Record(layers_every=10)"
        )
    return layers_of(run.events("layers"), job.optimizer)
