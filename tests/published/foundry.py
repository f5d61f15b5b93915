"""LLM Foundry's measured FSDP throughput (mosaicml/llm-foundry, scripts/train/benchmarking/README.md).

Sharded data parallel over all devices, fused attention, rates in tokens per second and device. The network between
nodes is not stated; 400 Gbit/s per device is assumed for the H100s and 200 for the A100s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from published.tables.machines import A100_80, H100, NVLINK3, NVLINK4, cluster, network
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

A100_40 = Device.of("a100-40gb")
INPUTS = (
    "model",
    "seq",
    "gpus",
    "gpu",
    "micro_batch",
    "grad_accum",
    "global_batch",
    "precision",
    "sharding",
    "act_ckpt",
)
STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
PRECISIONS = {"bf16": "bf16-mixed", "amp_bf16": "bf16-mixed", "amp_fp8": "fp8-mixed"}
MACHINES = {
    "h100_80gb": (H100, NVLINK4, network(400, "taken: one 400 Gbit/s card a device")),
    "a100_80gb": (A100_80, NVLINK3, network(200, "taken: one 200 Gbit/s card a device")),
    "a100_40gb": (A100_40, NVLINK3, network(200, "taken: one 200 Gbit/s card a device")),
}


def rows(block: Mapping[str, Any], dataset: str) -> list[Row]:
    """The rows of the README's tables."""
    columns, models = block["columns"], block["models"]
    return [_row(dict(zip(columns, values, strict=True)), models, dataset) for values in block["rows"]]


def _row(cells: Mapping[str, Any], models: Mapping[str, Any], dataset: str) -> Row:
    sizes, devices = models[cells["model"]], cells["gpus"]
    device, intra, inter = MACHINES[cells["gpu"]]
    tokens = cells["global_batch"] * cells["seq"]
    return Row(
        dataset=dataset,
        model=Transformer(
            name=f"mpt-{cells['model']}", layers=sizes["L"], hidden=sizes["h"], heads=sizes["heads"],
            vocab=models["V"], seq=cells["seq"], bias=False,
        ),
        cluster=cluster(device, devices, intra=intra, inter=inter),
        layout=Layout(
            data=devices, global_batch=cells["global_batch"], micro_batch=cells["micro_batch"],
            zero=STAGES[cells["sharding"]], recompute="full" if cells["act_ckpt"] else "none",
            precision=PRECISIONS[cells["precision"]],
        ),
        seconds=tokens / (cells["tok_per_s_per_gpu"] * devices),
        inputs={name: cells[name] for name in INPUTS},
        software="llm-foundry",
    )  # fmt: skip
