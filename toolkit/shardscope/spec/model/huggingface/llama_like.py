"""Readers of the types with rotary positions, RMSNorm and a gated feed-forward layer, like Llama."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardscope.spec.mixture import Mixture
from shardscope.spec.model.huggingface.config import (
    Config,
    Fields,
    attention_bias,
    sizes,
    sliding_window,
)
from shardscope.spec.model.transformer import LatentAttention


def _llama_like(config: Config, *, seq: int = 2048, tied: bool = False) -> Fields:
    """Return the fields that Llama-like models share: rotary positions, RMSNorm, gated feed-forward, no biases."""
    return {
        **sizes(config, seq=seq),
        "ffn": config.size("intermediate_size"),
        "tied": config.flag("tie_word_embeddings", default=tied),
        "gated": True,
        "positions": "rotary",
        "norm": "rmsnorm",
        "bias": False,
    }


_ALL_HEADS = ("granite", "llama", "olmo", "olmo2", "olmo3", "olmoe", "phi3")
"""Types whose ``num_key_value_heads`` is the number of heads by default."""


def _grouped(config: Config, **defaults: Any) -> Fields:
    """Return Llama-like fields with grouped-query attention.

    The default of ``num_key_value_heads`` in transformers depends on the model type, so a config must give this key
    unless its type is in `_ALL_HEADS`.
    """
    if config.keys["model_type"] not in _ALL_HEADS and "num_key_value_heads" not in config.keys:
        config.size("num_key_value_heads")
    return {
        **_llama_like(config, **defaults),
        "kv_heads": config.size("num_key_value_heads", config.size("num_attention_heads")),
        "head_size": config.size("head_dim", 0) or None,
    }


def _llama(config: Config, **defaults: Any) -> Fields:
    biased = config.flag("mlp_bias", default=False)
    return {**_grouped(config, **defaults), **attention_bias(config), "bias": biased}


def _no_window(config: Config) -> None:
    config.nothing_but("use_sliding_window", allowed=False)


def _smollm3(config: Config) -> Fields:
    _no_window(config)
    return _llama(config, seq=32768, tied=True)


def _mistral(config: Config) -> Fields:
    return {**_grouped(config, seq=131072), **sliding_window(config, default=4096)}


def _phi3(config: Config) -> Fields:
    return {**_grouped(config, seq=4096), **sliding_window(config)}


def _gemma(config: Config) -> Fields:
    return {
        **_grouped(config, seq=8192, tied=True),
        **attention_bias(config),
        "head_size": config.size("head_dim", 256),
    }


def _gemma2(config: Config) -> Fields:
    return {
        **_gemma(config),
        **sliding_window(config, default=4096, every=2),
        "norms_per_layer": 4,
    }


_GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip
"""Defaults of transformers: Gemma's own configs leave out the values that they share with the smallest Gemma 3."""


def _gemma3(config: Config) -> Fields:
    config.nothing_but("use_bidirectional_attention", allowed=False)
    given = {key: value for key, value in config.keys.items() if value is not None or key not in _GEMMA3}
    config = Config({**_GEMMA3, **given}, config.path)
    return {
        **_gemma(config),
        **sliding_window(config, default=4096, every=6),
        "norms_per_layer": 4,
        "qk_norm": True,
    }


def _glm(config: Config, *, norms: int) -> Fields:
    return {
        **_grouped(config, seq=131072),
        "qkv_bias": config.flag("attention_bias", default=True),
        "head_size": config.size("head_dim", 128),
        "norms_per_layer": norms,
    }


def _glm4v_text(config: Config) -> Fields:
    return {**_grouped(config, seq=32768), "qkv_bias": True, "norms_per_layer": 4}


def _seed_oss(config: Config) -> Fields:
    return {
        **_llama(config, seq=524288),
        "qkv_bias": config.flag("attention_bias", default=True),
        "out_bias": config.flag("attention_out_bias", default=False),
        "head_size": None if config.keys.get("head_dim", 0) is None else config.size("head_dim", 128),
    }


def _olmo(config: Config) -> Fields:
    return {**_grouped(config), **attention_bias(config), "norm": "unweighted"}


def _olmo2(config: Config) -> Fields:
    return {**_grouped(config), **attention_bias(config), "qk_norm": "width"}


def _olmo3(config: Config) -> Fields:
    return {**_olmo2(config), **sliding_window(config, default=4096, every=4)}


def _qwen2(config: Config) -> Fields:
    _no_window(config)
    return {**_grouped(config, seq=32768), "qkv_bias": True}


def _qwen3(config: Config, *, seq: int = 32768) -> Fields:
    _no_window(config)
    return {
        **_grouped(config, seq=seq),
        **attention_bias(config),
        "head_size": config.size("head_dim", 128),
        "qk_norm": True,
    }


def _experts(
    config: Config, key: str, *, active: int, width: str = "intermediate_size", **more: Any
) -> Mixture:
    """Return the mixture of experts; `active` is the type's default top-k, and `key` and `width` are config keys."""
    return Mixture(
        experts=config.size(key),
        active=config.size("num_experts_per_tok", active),
        ffn=config.size(width),
        **more,
    )


def _mixtral(config: Config) -> Fields:
    mixture = _experts(config, "num_local_experts", active=2)
    return {**_grouped(config, seq=131072), **sliding_window(config), "mixture": mixture}


def _phimoe(config: Config) -> Fields:
    return {
        **_mixtral(config),
        **attention_bias(config),
        "norm": "layernorm",
        "head_bias": config.flag("lm_head_bias", default=False),
    }


def _olmoe(config: Config) -> Fields:
    sizes = {**_olmo2(config), "seq": config.size("max_position_embeddings", 4096)}
    return {**sizes, "mixture": _experts(config, "num_experts", active=8)}


def _gpt_oss(config: Config) -> Fields:
    return {
        **_grouped(config, seq=131072),
        **attention_bias(config, default=True),
        **sliding_window(config, default=128, every=2),
        "head_size": config.size("head_dim", 64),
        "bias": True,
        "attention_sinks": True,
        "mixture": _experts(config, "num_local_experts", active=4, router_bias=True),
    }


def _every_layer_sparse(config: Config) -> None:
    config.nothing_but("decoder_sparse_step", 1)
    config.nothing_but("mlp_only_layers", [])


def _qwen2_moe(config: Config) -> Fields:
    _every_layer_sparse(config)
    shared = config.size("shared_expert_intermediate_size")
    mixture = _experts(
        config, "num_experts", active=4, width="moe_intermediate_size", shared_ffn=shared, shared_gate=True
    )
    return {**_qwen2(config), "qkv_bias": config.flag("qkv_bias", default=True), "mixture": mixture}


def _qwen3_moe(config: Config, *, seq: int = 32768) -> Fields:
    _every_layer_sparse(config)
    _no_window(config)
    published = "num_experts" in config.keys  # transformers 5 writes num_local_experts
    key = "num_experts" if published else "num_local_experts"
    mixture = _experts(config, key, active=8, width="moe_intermediate_size")
    return {**_grouped(config, seq=seq), **attention_bias(config), "qk_norm": True, "mixture": mixture}


def _deepseek(config: Config, *, seq: int, shared_experts: int, dense_layers: int) -> Fields:
    for biased in ("attention_bias", "mlp_bias"):
        config.nothing_but(biased, allowed=False)
    query_rank = 0 if config.keys.get("q_lora_rank", 0) is None else config.size("q_lora_rank", 1536)
    latent = LatentAttention(
        query_rank=query_rank,  # null means no compression here, not a missing key
        kv_rank=config.size("kv_lora_rank"),
        rope_size=config.size("qk_rope_head_dim"),
        nope_size=config.size("qk_nope_head_dim"),
        value_size=config.size("v_head_dim"),
    )
    width = config.size("moe_intermediate_size")
    mixture = Mixture(
        experts=config.size("n_routed_experts"),
        active=config.size("num_experts_per_tok"),
        ffn=width,
        shared_ffn=config.size("n_shared_experts", shared_experts) * width,
        dense_layers=min(
            config.size("first_k_dense_replace", dense_layers), config.size("num_hidden_layers")
        ),
    )
    return {**_llama_like(config, seq=seq), "latent": latent, "mixture": mixture}


READERS: dict[str, Callable[[Config], Fields]] = {
    "deepseek_v2": partial(_deepseek, seq=2048, shared_experts=2, dense_layers=0),
    "deepseek_v3": partial(_deepseek, seq=4096, shared_experts=1, dense_layers=3),
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": partial(_glm, norms=2),
    "glm4": partial(_glm, norms=4),
    "glm4v_text": _glm4v_text,
    "gpt_oss": _gpt_oss,
    "granite": _llama,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "phimoe": _phimoe,
    "qwen2": _qwen2,
    "qwen2_5_omni_text": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen2_vl_text": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": partial(_qwen3_moe, seq=128000),
    "qwen3_vl_text": partial(_qwen3, seq=128000),
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
