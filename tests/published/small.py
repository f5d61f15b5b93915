"""Two tables of small models on other devices: Sailor's GH200 runs, and Mist's runs on L4.

Sailor (eth-easl/sailor, Planner/simulations/validation): Megatron-DeepSpeed, tensor-parallel over the four GH200 of a
node. A stage's layers include embedding and head; a run that is listed with GPT-Neo has the layers of OPT. The
precision is not stated; Megatron's default, fp32, agrees with the times. Mist (Dazz993/Mist,
benchmark/mist/tuned_configs/l4-24gb): of its runs, those that recompute and offload nothing, on one node of L4 with
PCIe 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

SIZES = {
    "OPT-350M": {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 50272, "seq": 2048},
    "GPT-Neo-2.7B": {"layers": 32, "hidden": 2560, "heads": 32, "vocab": 128256, "seq": 2048},
}


def sailor(block: Mapping[str, Any], dataset: str) -> list[Row]:
    """The rows on GH200."""
    return [_sailor(cells, dataset) for cells in block["rows"] if cells["cluster"].startswith("GH200")]


def _sailor(cells: Mapping[str, Any], dataset: str) -> Row:
    layers = sum(cells["layers_per_stage"]) - 2
    sizes = next(each for each in SIZES.values() if each["layers"] == layers)
    return Row(
        dataset=dataset,
        model=Transformer(name=cells["model"], **sizes),
        cluster=Cluster.of("gh200-96gb", nodes=cells["nodes"], per_node=4),
        layout=Layout(
            data=cells["dp"][0], tensor=4, pipeline=cells["stages"], global_batch=cells["global_batch"],
            micro_batch=cells["micro_batch"], flash_attention=False, precision="fp32",
        ),
        seconds=cells["real_s"],
        inputs={name: cells[name] for name in ("plan", "micro_batch", "global_batch")},
        software="megatron-deepspeed",
    )  # fmt: skip


def mist(block: Mapping[str, Any], dataset: str) -> list[Row]:
    """The rows without recomputation and offload."""
    return [_mist(cells, dataset) for cells in block["rows"] if not any(cells["ckpt_layers_per_stage"])]


def _mist(cells: Mapping[str, Any], dataset: str) -> Row:
    first = cells["stage_strategies"][0]
    data, tensor = first[1], first[2]
    gated = cells["mlp"] == "gated_mlp"
    return Row(
        dataset=dataset,
        model=Transformer(
            name=cells["model"], layers=cells["L"], hidden=cells["h"], heads=cells["heads"], ffn=cells["ffn"],
            vocab=cells["V"], seq=cells["seq"], gated=gated, tied=False,
        ),
        cluster=Cluster.of("l4", nodes=1, per_node=cells["gpus_per_node"]),
        layout=Layout(
            data=data, tensor=tensor, pipeline=len(cells["layers_per_stage"]), global_batch=cells["global_batch"],
            micro_batch=first[0], zero=1, flash_attention=cells["flash"], precision="fp16-mixed",
        ),
        seconds=cells["measured_s"],
        inputs={"case": cells["case"]},
        software="megatron-core",
    )  # fmt: skip
