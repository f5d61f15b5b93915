"""Passes of one micro-batch through a whole transformer on one device, as terms, for jobs that no layout describes."""

from __future__ import annotations

from typing import NamedTuple

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.terms import Term
from shardscope.calibration.calibration import Calibration
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.tables import micro_table
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

_EDGE_FORWARD = 1 / 3
"""Share of the embedding and the output projection that the forward pass computes: one of three products."""
_SOURCE = "as for a layout: products by size, attention, launches"


class Passes(NamedTuple):
    """Forward and backward pass of one micro-batch, in seconds, with recomputation and waits for launches."""

    forward: Term
    backward: Term


def whole_passes(
    model: Transformer,
    cluster: Cluster,
    calibration: Calibration,
    *,
    micro_batch: int,
    precision: str,
    recompute: str,
    slower: float = 1.0,
) -> Passes:
    """Return the passes of a micro-batch of `micro_batch` sequences.

    Args:
        model: The transformer.
        cluster: The cluster.
        calibration: The cluster's constants.
        micro_batch: Number of sequences.
        precision: A layout's precision.
        recompute: What is recomputed.
        slower: Factor by which products and memory are slower than in this precision.
    """
    layout = Layout(
        micro_batch=micro_batch, global_batch=micro_batch, precision=precision, recompute=recompute
    )
    table = Layouts.of([layout])
    machine = Machine.of(cluster, calibration, precision)
    rates = ("matmul_rate", "wide_rate", "attention_rate", "unfused_rate", "memory_rate")
    machine = machine._replace(**{name: getattr(machine, name) / slower for name in rates})
    one = micro_table(model, machine, table).take(slice(0, 1))
    edge, inputs = float(one["edge"][0]), {"layers": float(model.layers), "samples": float(micro_batch)}

    def term(name: str, layers: float, ends: float) -> Term:
        source = f"{_SOURCE}; rates: {calibration.name}"
        parts = (
            Term("layers", layers, "s", "layers × (products + attention + bytes + launches)", inputs, source),
            Term("embedding and output", ends, "s", "products + bytes of logits", inputs, source),
        )
        return Term.total(name, parts)

    backward = float(one["input"][0] + one["weight"][0])
    return Passes(
        term("forward", float(one["forward"][0]), edge * _EDGE_FORWARD),
        term("backward", backward, edge * (1 - _EDGE_FORWARD)),
    )
