"""Predicted against measured memory: Megatron-LM with TransformerEngine on B200 GPUs.

The measurements are SimuMax's (MooreThreads/SimuMax, docs/b200, Apache-2.0) and are not part of this project:
``SHARDSCOPE_REFERENCE=published.json`` names a file of them. Nothing is fitted; the rules are those of
`FRAMEWORKS["megatron-core"]` with ZeRO-1 (the distributed optimizer), sequence parallelism and no recomputation.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardscope.analytic.memory import stage_memory
from shardscope.spec.layout import Layout
from shardscope.spec.model import LatentAttention, Mixture, Transformer

REFERENCE = os.environ.get("SHARDSCOPE_REFERENCE", "")
B200 = json.loads(Path(REFERENCE).read_text())["simumax_b200"] if REFERENCE else {"rows": []}
TOLERANCE = 0.01


def model_of(row: dict[str, Any]) -> Transformer:
    """The row's model, with as many layers as were run."""
    configs = B200["inputs"]["model_configs"]
    sizes = next(config for name, config in configs.items() if name.startswith(row["model"]))
    own: dict[str, Any] = {}
    if "expert_num" in sizes:
        own["mixture"] = Mixture(
            experts=sizes["expert_num"], active=sizes["topk"], ffn=sizes["moe_ffn_hidden_size"],
            shared_ffn=sizes["moe_shared_expert_intermediate_size"], dense_layers=1,
        )  # fmt: skip
        own["latent"] = LatentAttention(
            query_rank=sizes["q_lora_rank"], kv_rank=sizes["kv_lora_rank"],
            rope_size=sizes["qk_pos_emb_head_dim"], nope_size=sizes["qk_head_dim"], value_size=sizes["v_head_dim"],
        )  # fmt: skip
    return Transformer(
        layers=row["layers"], hidden=sizes["hidden_size"], heads=sizes["head_num"],
        kv_heads=sizes["kv_head_num"], head_size=sizes["head_size"], ffn=sizes["intermediate_size"],
        vocab=sizes["vocab_size"], seq=row["seq"], gated=True, tied=False, positions="rotary", norm="rmsnorm",
        bias=False, **own,
    )  # fmt: skip


def layout_of(row: dict[str, Any]) -> Layout:
    return Layout(
        data=row["dp"], tensor=row["tp"], pipeline=row["pp"], context=row["cp"], expert=row["ep"], zero=1,
        global_batch=row["dp"] * row["microbatches"], sequence_parallel=True,
    )  # fmt: skip


@pytest.mark.skipif(not REFERENCE, reason="set SHARDSCOPE_REFERENCE to a file of measured memory")
@pytest.mark.parametrize("row", B200["rows"], ids=lambda row: row["case"])
def test_the_fullest_device_is_within_one_percent(row: dict[str, Any]) -> None:
    held = stage_memory(model_of(row), layout_of(row))
    assert held.total.max() / 2**30 == pytest.approx(row["real_alloc_gib"], rel=TOLERANCE)


@pytest.mark.skipif(not REFERENCE, reason="set SHARDSCOPE_REFERENCE to a file of measured memory")
@pytest.mark.parametrize("row", B200["rows"], ids=lambda row: row["case"])
def test_every_stage_is_within_one_percent(row: dict[str, Any]) -> None:
    held, measured = stage_memory(model_of(row), layout_of(row)), row["rank_alloc_mb"]
    each = len(measured) // row["pp"]
    firsts = [measured[stage * each] for stage in range(row["pp"])]
    assert (held.total / 2**20).tolist() == pytest.approx(firsts, rel=TOLERANCE)
