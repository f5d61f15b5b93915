"""Counts of described transformers against published ones and against modules built in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shardscope.errors import SpecError
from shardscope.spec.model import LatentAttention, Mixture, Model, Transformer
from shardscope.spec.models import MODELS, GPTConfig
from shardscope.training.models import build_model

LLAMA: dict[str, Any] = {
    "gated": True,
    "tied": False,
    "positions": "rotary",
    "norm": "rmsnorm",
    "bias": False,
}
DEEPSEEK_V3 = Mixture(experts=256, active=8, ffn=2048, shared_ffn=2048, dense_layers=3, router_bias=True)
LATENT = LatentAttention(query_rank=1536, kv_rank=512, rope_size=64, nope_size=128, value_size=128)

PUBLISHED: list[tuple[dict[str, Any], int]] = [
    ({"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "seq": 1024}, 124_439_808),
    ({"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000, "seq": 4096, **LLAMA}, 6_738_415_616),
    (
        {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 8192, **LLAMA},
        8_030_261_248,
    ),
    (
        {
            "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 32000, "seq": 4096,
            "mixture": Mixture(experts=8, active=2, ffn=14336), **LLAMA,
        },
        46_702_792_704,
    ),
    (
        {
            "layers": 61, "hidden": 7168, "heads": 128, "ffn": 18432, "vocab": 129280, "seq": 4096,
            "mixture": DEEPSEEK_V3, "latent": LATENT, **LLAMA,
        },
        671_026_419_200,
    ),
    (
        {
            "layers": 24, "hidden": 1024, "heads": 16, "vocab": 30522, "seq": 512, "final_norm": False,
            "embedding_norm": True, "token_types": 2, "pooler": True, "lm_head": False,
        },
        335_141_888,
    ),
]  # fmt: skip
NAMES = ["gpt2", "llama-2-7b", "llama-3-8b", "mixtral-8x7b", "deepseek-v3", "bert-large"]


@pytest.mark.parametrize(("sizes", "count"), PUBLISHED, ids=NAMES)
def test_parameters_are_those_published(sizes: dict[str, Any], count: int) -> None:
    assert Model.transformer(**sizes).num_params == count


@pytest.mark.parametrize("name", [name for name, config in MODELS.items() if config.kind == "gpt"])
def test_the_projects_own_gpts_can_be_described(name: str) -> None:
    config = MODELS[name]
    assert isinstance(config, GPTConfig)
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert config.transformer(name).num_params == built


def test_a_token_passes_through_its_own_experts_only() -> None:
    mixtral = Model.transformer(**PUBLISHED[3][0])
    assert mixtral.num_active_params == 12_879_925_248  # 12.9 B, Jiang et al. 2024, table 1
    assert Model.transformer(**PUBLISHED[0][0]).num_active_params == 124_439_808


def test_what_is_left_out_is_filled_in() -> None:
    model = Transformer(layers=1, hidden=64, heads=4, kv_heads=None, vocab=10, seq=8)
    assert (model.kv_heads, model.head_size, model.ffn) == (4, 16, 256)
    assert Transformer.from_json(model.to_json()) == model


@pytest.mark.parametrize("kind", [str, float, np.int64], ids=["text", "float", "numpy"])
def test_what_follows_is_filled_in_whatever_kind_of_number_is_given(kind: Callable[[int], Any]) -> None:
    model = Transformer(layers=kind(1), hidden=kind(64), heads=kind(4), vocab=10, seq=8)
    assert model == Transformer(layers=1, hidden=64, heads=4, vocab=10, seq=8)
    assert (model.kv_heads, model.head_size, model.ffn) == (4, 16, 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads=3 does not divide hidden=64; give head_size=... or other heads"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4; use one of 1, 2, 4"),
        ({"layers": 0}, "layers=0 is not valid"),
        ({"depth": 2}, "depth"),
        ({"mixture": {"experts": 2, "active": 3, "ffn": 8}}, "active=3 is more than mixture.experts=2; use 1 to 2"),
        (
            {"mixture": {"experts": 2, "active": 1, "ffn": 8, "dense_layers": 5}},
            "mixture.dense_layers=5 is more than layers=2; use 0 to 2",
        ),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 10, "seq": 8, **changes}
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        Transformer(**fields)
