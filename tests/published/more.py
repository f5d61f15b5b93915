"""Measured steps in the toolkit's own vocabulary: model, device, nodes, layout and seconds of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

SOFTWARE = {"NeMo": "nemo", "BLOOM": "megatron-deepspeed"}


def rows(blocks: list[Mapping[str, Any]]) -> dict[str, list[Row]]:
    """The rows by group; runs that were published twice are kept once."""
    found: dict[str, dict[str, Row]] = {}
    for cells in blocks:
        row = _row(cells)
        found.setdefault(cells["group"], {}).setdefault(f"{row.key} {row.seconds}", row)
    return {name: list(group.values()) for name, group in found.items()}


def _row(cells: Mapping[str, Any]) -> Row:
    model = Transformer(**cells["model"])
    return Row(
        dataset=cells["group"],
        model=model,
        cluster=Cluster.of(cells["device"], nodes=cells["nodes"], per_node=cells["per_node"]),
        layout=Layout(**cells["layout"]),
        seconds=cells["seconds"],
        inputs={name: cells[name] for name in ("label", "model", "layout", "device", "nodes", "per_node")},
        software=SOFTWARE[cells["group"].split()[0]],
    )
