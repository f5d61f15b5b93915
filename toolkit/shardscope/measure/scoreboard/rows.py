"""Rows of published measurements: layout, model, cluster, step time, and a hash of the inputs as identifier."""

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
from shardscope.prediction.step import StepParts, step_time
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
    """Software that ran it; a name of `calibration.software.SOFTWARE`."""

    @classmethod
    def of(
        cls,
        dataset: str,
        model: Transformer,
        cluster: Cluster,
        layout: Layout,
        seconds: float,
        *,
        software: str = "megatron-core",
        release: str = "",
    ) -> Row:
        """Return a row whose inputs are its model, its cluster, its layout and the software's release.

        Defaults of the layout are left out, so that keys of fitted rows remain valid when `Layout` gets a new field.
        """
        inputs = {
            "model": model.name, "seq": model.seq, "devices": cluster.device.name, "nodes": cluster.nodes,
            "layout": set_fields(layout), "release": release,
        }  # fmt: skip
        return cls(dataset, model, cluster, layout, seconds, inputs, software)

    @property
    def key(self) -> str:
        """Hash of the inputs, as twelve hexadecimal digits; the same for equal runs, even if measurements differ."""
        text = json.dumps([self.dataset, self.inputs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def configuration(self) -> str:
        """What identifies a configuration: model and layout, whatever the batch."""
        once = {"global_batch": self.layout.data * self.layout.micro_batch}
        return f"{self.model!r} {set_fields(self.layout.model_copy(update=once))}"


def set_fields(layout: Layout) -> dict[str, object]:
    """Return the fields of a layout that differ from their defaults, so that a new field leaves others' keys alone."""
    usual = type(layout)().model_dump(mode="json")
    return {name: value for name, value in layout.model_dump(mode="json").items() if value != usual[name]}


class RowGroups(NamedTuple):
    """Rows with the same model and cluster as one table of layouts each, so that a prediction is one call for each."""

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

    def parts(self, calibration: Calibration) -> StepParts:
        """Return the parts of the rows' step times, one array per part, in the order of the rows."""
        found = [step_time(model, table, cluster, calibration) for model, cluster, table in self.groups]
        return StepParts(*(np.concatenate(part)[self.order] for part in zip(*found, strict=True)))

    def seconds(self, calibration: Calibration) -> npt.NDArray[np.float64]:
        """Return the predicted step time of each row, in seconds."""
        return self.parts(calibration).total


def predicted_seconds(rows: Sequence[Row], calibration: Calibration) -> npt.NDArray[np.float64]:
    """Return the predicted step time of each row, in seconds."""
    return RowGroups.of(rows).seconds(calibration)


def _group(row: Row) -> str:
    layout = row.layout
    kinds = (layout.precision, layout.optimizer, layout.flash_attention)
    return f"{row.model!r} {row.cluster!r} {kinds}"
