"""Measured steps: layout, model, cluster, step time, a hash of the inputs as identifier, and prediction errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.choice import calibration_for
from shardscope.calibration.software import software_of
from shardscope.prediction.layout import uncertainty_of
from shardscope.prediction.step import step_time
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One measurement of one layout."""

    dataset: str
    model: Transformer
    cluster: Cluster
    layout: Layout
    seconds: float
    """Measured step time, in seconds."""
    inputs: Mapping[str, object] = field(default_factory=dict)
    """Published inputs of the run, without measurements."""
    software: str = "megatron-core"
    """Software that ran the step; a name in `calibration.software.SOFTWARE`."""

    @property
    def key(self) -> str:
        """Hash of the inputs, as twelve hexadecimal digits; the same for equal runs, even if measurements differ."""
        text = json.dumps([self.dataset, self.inputs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def configuration(self) -> str:
        """Identity of the configuration: model and layout, regardless of the batch."""
        once = {"global_batch": self.layout.data * self.layout.micro_batch}
        return f"{self.model!r} {set_fields(self.layout.model_copy(update=once))}"


def set_fields(layout: Layout) -> dict[str, object]:
    """Return the fields of a layout that differ from their defaults; adding a field thus keeps existing keys valid."""
    usual = type(layout)().model_dump(mode="json")
    return {name: value for name, value in layout.model_dump(mode="json").items() if value != usual[name]}


class RowGroups(NamedTuple):
    """Rows grouped by model and cluster, with one table of layouts per group, so that a group is predicted in one
    call.
    """

    groups: tuple[tuple[Transformer, Cluster, Layouts], ...]
    order: npt.NDArray[np.intp]
    """Index of each row in the concatenation of all groups."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> RowGroups:
        """Group the rows."""
        names = [_group(row) for row in rows]
        places = sorted(range(len(rows)), key=names.__getitem__)
        parts = [list(part) for _, part in groupby(places, key=names.__getitem__)]
        groups = tuple(
            (rows[part[0]].model, rows[part[0]].cluster, Layouts.of(rows[place].layout for place in part))
            for part in parts
        )
        return cls(groups, np.argsort(places))

    def seconds(self, calibration: Calibration) -> Floats:
        """Return the predicted step time of each row, in seconds."""
        found = [step_time(model, table, cluster, calibration).total for model, cluster, table in self.groups]
        return np.concatenate(found)[self.order]


def predicted_seconds(rows: Sequence[Row], calibration: Calibration) -> Floats:
    """Return the predicted step time of each row, in seconds."""
    return RowGroups.of(rows).seconds(calibration)


class RowScore(NamedTuple):
    """One measured step and its prediction, in seconds."""

    label: str
    measured_s: float
    predicted_s: float
    low_s: float
    """Lower end of the 90 % interval."""
    high_s: float

    @property
    def is_inside(self) -> bool:
        """Whether the interval contains the measured time."""
        return self.low_s <= self.measured_s <= self.high_s


def row_scores(rows: Sequence[Row]) -> list[RowScore]:
    """Return the prediction of each row, with the calibration that users get for its device and software."""
    found = []
    for row in rows:
        known = uncertainty_of(row.model, row.cluster, row.layout, calibration_of_row(row))
        predicted = float(predicted_seconds([row], calibration_of_row(row))[0])
        found.append(RowScore(str(row.inputs["label"]), row.seconds, predicted, *known.interval))
    return found


def calibration_of_row(row: Row) -> Calibration:
    """Return the calibration that a user gets for a row's device and software."""
    return calibration_for(row.cluster.device, software_of(row.software))


class Score(NamedTuple):
    """Errors of predicted against measured step times."""

    mape: float
    """Mean of |predicted / measured - 1|, in per cent."""
    worst: float
    """Largest |predicted / measured - 1|, in per cent."""
    rank: float
    """Spearman's rank correlation; NaN for a single row, and for rows with equal times."""
    rows: int

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> Score:
        """Return the score of predicted against measured step times in seconds, shape `(rows,)` each."""
        off = 100 * np.abs(predicted / measured - 1)
        return cls(float(off.mean()), float(off.max()), rank_correlation(predicted, measured), len(off))


def rank_correlation(left: Floats, right: Floats) -> float:
    """Return Spearman's rank correlation; NaN if all values of one side are equal."""
    from scipy.stats import spearmanr  # takes half a second

    if min(len(np.unique(left)), len(np.unique(right))) < 2:
        return float("nan")  # SciPy would warn
    return float(spearmanr(left, right).statistic)


def _group(row: Row) -> str:
    layout = row.layout
    kinds = (layout.precision, layout.optimizer, layout.flash_attention)
    return f"{row.model!r} {row.cluster!r} {kinds}"
