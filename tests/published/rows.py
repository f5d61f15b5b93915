"""Rows of published measurements."""

from __future__ import annotations

from shardscope.measure.calibrate.rows import Row, set_fields
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer


def published_row(
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
    return Row(dataset, model, cluster, layout, seconds, inputs, software)
