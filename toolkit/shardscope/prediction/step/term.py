"""Step time as a tree of terms, each with its formula, inputs and source."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.recomputation import recomputed_layers
from shardscope.analytic.terms import Term
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.layer_shape import factor_of, shape_of
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.step import SCALED, StepDetail, StepParts, step_detail
from shardscope.prediction.step.tables import stage_elements
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

NAMES: Mapping[str, str] = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor_comm": "tensor parallel messages",
    "context_comm": "context parallel messages",
    "expert_comm": "expert parallel messages",
    "pipeline_comm": "messages between stages",
    "bubble": "pipeline bubble",
    "data_comm": "gradients and gathered parameters",
    "optimizer": "optimizer",
    "offload": "offload",
    "overhead": "launches and fixed cost",
}
FORMULAS: Mapping[str, tuple[str, str]] = {
    "recompute": ("m × recomputed part of the forward pass", "Korthikanti et al. 2022, arXiv 2205.05198"),
    "tensor_comm": (
        "m × (layers × 2 all-reduces per direction, less the part hidden by computation, + 2)",
        "Shoeybi et al., arXiv 1909.08053; Wang et al. 2023, ASPLOS",
    ),
    "context_comm": ("m × layers × gathering keys and values: 1 forward, 2 back", "Llama 3, arXiv 2407.21783, 3.3.2"),
    "expert_comm": ("m × layers × 2 all-to-alls per direction", "Lepikhin et al. 2020, arXiv 2006.16668"),
    "pipeline_comm": ("2 (m v + p − 1) × (bytes / (t B) + start)", "Narayanan et al. 2021, arXiv 2104.04473, 4.1"),
    "bubble": ("(p − 1) / v × (forward + backward, with waits) − weight gradients", "closed form of the schedule"),
    "data_comm": ("reduce + gather − part hidden by computation", "Rajbhandari et al. 2020, arXiv 1910.02054, 7"),
    "optimizer": ("states / N × bytes / bandwidth, and Muon's products", "reads and writes of every state"),
    "offload": (
        "m × max(0, host traffic of a pass − computation − collectives) + traffic and time of the update",
        "Ren et al. 2021, arXiv 2101.06840; Rajbhandari et al. 2021, arXiv 2104.07857",
    ),
    "overhead": (
        "m × ((launches³ + (work + exposed launches)³)^⅓ − work of a block) + a step's fixed cost", "calibration",
    ),
}  # fmt: skip
"""Formula and source of each part, with m micro-batches, p pipeline stages of v virtual stages each, t tensor-parallel
ranks, bandwidth B, and N ranks that share the optimizer update."""
_OF_LAYERS = ("recompute", "tensor_comm", "context_comm", "expert_comm", "overhead")
"""Parts whose layer times are multiplied by the factor of the layer's shape; embedding, output and fixed cost are
not."""
_SHAPE = "factor of the layer's shape"
_HYBRID = (
    "reduce = reduce-scatter in a shard + all-reduce between shards, "
    "or max(reduce-scatter, all-reduce − gather of ZeRO 3) if shards lie inside nodes and their replicas do not"
)
"""Addition to the formula of gradients and parameters if shards are replicated (HSDP)."""


def time_term(model: Transformer, layout: Layout, cluster: Cluster, calibration: Calibration) -> Term:
    """Return the step time, in seconds, as a sum of terms; parts that are 0 are left out.

    All values, including totals, come from `step_detail`; none is computed as the difference of others. On a mixed
    cluster, parts that are proportional to the time of the slowest stage have its pace as a factor (`LayerSplit.pace`).
    """
    found = step_detail(model, Layouts.of([layout]), cluster, calibration)
    inputs, factor = _inputs(model, layout, cluster, calibration), _shape_factor(model, layout, calibration)
    terms = [_compute(model, layout, cluster, calibration, found)]
    for field in StepParts._fields[1:-1]:
        value = float(getattr(found.parts, field)[0])
        if value > 0:
            formula, source = FORMULAS[field]
            if field == "data_comm" and "shard" in inputs[field]:
                formula = f"{formula}, {_HYBRID}"
            if factor and field in _OF_LAYERS:
                formula = f"{formula}, layers × {_SHAPE}"
                inputs[field] |= factor
            if cluster.groups and field in SCALED:
                formula = f"{formula}, × pace"
                inputs[field] |= {"pace": float(found.pace[0])}
            terms.append(
                Term(NAMES[field], value, "s", formula, inputs[field], f"{source}; rates: {calibration.name}")
            )
    return Term("step", float(found.parts.total[0]), "s", parts=tuple(terms))


def _recomputed(model: Transformer, layout: Layout) -> dict[str, float | str]:
    """Return the recomputed layers of the largest stage as an input of a term; nothing if these are all or none."""
    layers = float(np.ceil(model.layers / layout.pipeline))
    most = layout.recompute_layers * layout.virtual_stages
    return {"recomputed layers": float(recomputed_layers(layers, most)), "layers": layers} if most else {}


def _shape_factor(model: Transformer, layout: Layout, calibration: Calibration) -> dict[str, float | str]:
    """Return the calibration's factor of the layer's shape as an input of a term; nothing if it is 1."""
    known = calibration.shapes
    factor = factor_of(known, shape_of(model, layout)) if known else 1.0
    return {} if factor == 1.0 else {_SHAPE: factor}


def _compute(
    model: Transformer, layout: Layout, cluster: Cluster, calibration: Calibration, found: StepDetail
) -> Term:
    machine = Machine.of(cluster, calibration, layout.precision)
    source = f"roofline, Williams et al. 2009; rates: {calibration.name}"
    shares: dict[str, float | str] = {
        "m": layout.num_micro_batches,
        "layers": float(np.ceil(model.layers / layout.pipeline)),
        "products in": machine.format,
        "FLOP/s of huge products": machine.matmul_rate,
        "w": calibration.half_size,
        "bytes/s": machine.memory_rate,
        **({"pace": float(found.pace[0])} if cluster.groups else {}),
    }
    factor = _shape_factor(model, layout, calibration)
    formula = "m × layers × (Σ 2mnk / rate (1 + w (1/m + 1/n + 1/k)) + bytes / bandwidth)"
    if factor:
        formula += f" × {_SHAPE}"
    if cluster.groups:
        formula += ", × pace"
    edge = "m × (3 products s b × h × V/t + bytes of logits / bandwidth) − slack of the last stage"
    of_layers = shares | factor
    directions = (
        ("forward", found.computing.forward, formula, of_layers),
        ("backward", found.computing.backward, f"twice the products and bytes of: {formula}", of_layers),
        ("embedding and output", found.computing.edge, edge, shares),
    )
    parts = tuple(
        Term(name, float(value[0]), "s", text, inputs, source) for name, value, text, inputs in directions
    )
    return Term("compute", float(found.parts.compute[0]), "s", parts=parts)


def _inputs(
    model: Transformer, layout: Layout, cluster: Cluster, cal: Calibration
) -> dict[str, dict[str, float | str]]:
    count, replicas = layout.num_micro_batches, layout.data * layout.context
    dense, experts = stage_elements(
        model, tensor=layout.tensor, pipeline=layout.pipeline, expert=layout.expert
    )
    micro: dict[str, float | str] = {
        "m": count,
        "tokens": layout.micro_batch * model.seq / layout.context,
        "h": model.hidden,
    }
    inside: dict[str, float | str] = {
        "share of bandwidth": cal.intra_rate(cluster.intra) / cluster.intra.bandwidth
    }
    pipe: dict[str, float | str] = {"p": layout.pipeline, "v": layout.virtual_stages}
    states: dict[str, float | str] = {"elements": float(dense + experts)}
    hybrid: dict[str, float | str] = (
        {"shard": layout.shard} if layout.zero and 0 < layout.shard < replicas else {}
    )
    return {
        "recompute": {"m": count, "kind": layout.recompute, **_recomputed(model, layout)},
        "tensor_comm": {
            **micro, "t": layout.tensor, **inside, "start": cal.collective_s, "hidden share": cal.message_overlap,
        },
        "context_comm": {**micro, "c": layout.context, **inside},
        "expert_comm": {**micro, "e": layout.expert, **inside},
        "pipeline_comm": {**micro, **pipe, "share of bandwidth": cal.pipeline_efficiency},
        "bubble": {"m": count, **pipe, "schedule": layout.schedule},
        "data_comm": {
            **states, "d × c": replicas, "ZeRO": layout.zero, **hybrid, "compression": layout.axis("compression"),
            "hidden share": cal.shard_overlap if layout.zero >= 2 else cal.gradient_overlap,
        },
        "optimizer": {
            **states,
            "N": (layout.shard or replicas) if layout.zero else 1,
            "share of bandwidth": cal.optimizer_efficiency,
        },
        "offload": {
            **states, "m": count, "offload": layout.offload, "recompute": layout.recompute,
            **_recomputed(model, layout),
            "bytes/s to the host": cluster.device.host_bandwidth,
            "bytes/s to a device's share of the drives": cluster.nvme_bandwidth / cluster.per_node,
        },
        "overhead": {
            "a kernel": cal.launch_s, "exposed share": cal.exposed_launch if layout.tensor > 1 else 0.0,
            "a step": cal.step_s, "m": count,
        },
    }  # fmt: skip
