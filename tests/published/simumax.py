"""SimuMax's measured Megatron-LM steps on one node of B200 (MooreThreads/SimuMax, docs/b200, release 1.2).

bf16, micro-batches of one sequence, no recomputation, distributed optimizer, sequence parallel with tensor parallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from published.tables.machines import cluster, network
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Device, Link
from shardscope.spec.layout import Layout
from shardscope.spec.model import LatentAttention, Mixture, Transformer

INPUTS = ("model", "layers", "tp", "pp", "dp", "ep", "cp", "seq", "microbatches")
B200, NVLINK5 = Device.of("b200"), Link.of("nvlink-5")
NETWORK = network(400, "unused: one node")


def rows(block: Mapping[str, Any], dataset: str) -> list[Row]:
    """The rows of the release's summary."""
    configs = block["inputs"]["model_configs"]
    names = {name.removesuffix("_padding_128"): config for name, config in configs.items()}
    return [_row(cells, names[cells["model"]], dataset) for cells in block["rows"]]


def _row(cells: Mapping[str, Any], config: Mapping[str, Any], dataset: str) -> Row:
    devices = cells["tp"] * cells["pp"] * cells["dp"] * cells["cp"]
    return Row(
        dataset=dataset,
        model=_model(cells, config),
        cluster=cluster(B200, max(8, devices), intra=NVLINK5, inter=NETWORK),
        layout=Layout(
            data=cells["dp"], tensor=cells["tp"], pipeline=cells["pp"], context=cells["cp"], expert=cells["ep"],
            zero=1, global_batch=cells["microbatches"] * cells["dp"], micro_batch=1,
            sequence_parallel=cells["tp"] > 1, precision="bf16-mixed",
        ),
        seconds=cells["real_ms"] / 1e3,
        inputs={name: cells[name] for name in INPUTS},
    )  # fmt: skip


def _model(cells: Mapping[str, Any], config: Mapping[str, Any]) -> Transformer:
    sparse = "expert_num" in config
    return Transformer(
        name=f"{cells['model']}-l{cells['layers']}",
        layers=cells["layers"],
        hidden=config["hidden_size"],
        heads=config["head_num"],
        kv_heads=config["kv_head_num"],
        head_size=config["head_size"],
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        seq=cells["seq"],
        gated=config["use_swiglu"],
        tied=False,
        positions="rotary",
        norm="rmsnorm",
        bias=False,
        mixture=_mixture(config) if sparse else None,
        latent=_latent(config) if config.get("attention_type") == "mla" else None,
    )


def _mixture(config: Mapping[str, Any]) -> Mixture:
    return Mixture(
        experts=config["expert_num"],
        active=config["topk"],
        ffn=config["moe_ffn_hidden_size"],
        shared_ffn=config["moe_shared_expert_intermediate_size"],
        dense_layers=1,
    )


def _latent(config: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        query_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        rope_size=config["qk_pos_emb_head_dim"],
        nope_size=config["qk_head_dim"],
        value_size=config["v_head_dim"],
    )
