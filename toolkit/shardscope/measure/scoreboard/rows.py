"""Rows of published measurements: layout, model, cluster, step time, and a hash of the inputs as identifier."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.prediction.step import StepParts, step_time
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer


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
    """Software that ran it; a name of `spec.software.SOFTWARE`."""

    @property
    def key(self) -> str:
        """Hash of the inputs, as twelve hexadecimal digits; the same for equal runs, even if measurements differ."""
        text = json.dumps([self.dataset, self.inputs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def predicted_parts(rows: Sequence[Row], calibration: Calibration) -> list[StepParts]:
    """Return the parts of each row's step time; rows with the same model and cluster are computed in one call."""
    order = sorted(range(len(rows)), key=lambda at: _group(rows[at]))
    found: dict[int, StepParts] = {}
    for _, group in groupby(order, key=lambda at: _group(rows[at])):
        at = list(group)
        table = Layouts.of(rows[i].layout for i in at)
        parts = step_time(rows[at[0]].model, table, rows[at[0]].cluster, calibration)
        found.update({i: StepParts(*(part[j] for part in parts)) for j, i in enumerate(at)})
    return [found[i] for i in range(len(rows))]


def predicted_seconds(rows: Sequence[Row], calibration: Calibration) -> npt.NDArray[np.float64]:
    """Return the predicted step time of each row, in seconds."""
    return np.array([float(parts.total) for parts in predicted_parts(rows, calibration)])


def _group(row: Row) -> str:
    layout = row.layout
    kinds = (layout.precision, layout.optimizer, layout.flash_attention)
    return f"{row.model!r} {row.cluster!r} {kinds}"
