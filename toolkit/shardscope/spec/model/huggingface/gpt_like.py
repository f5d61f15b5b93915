"""Readers of the types with LayerNorm: GPT-2 and its successors, BERT, and those with parallel attention."""

from __future__ import annotations

from collections.abc import Callable

from shardscope.spec.model.huggingface.config import (
    Config,
    Fields,
    attention_bias,
    sizes,
    sliding_window,
    wide,
)


def _tied(config: Config, *, default: bool) -> Fields:
    return {"tied": config.flag("tie_word_embeddings", default=default)}


def _gpt2(config: Config) -> Fields:
    config.nothing_but("add_cross_attention", allowed=False)
    return {**sizes(config, seq=1024), **wide(config, "n_inner"), **_tied(config, default=True)}


def _gpt_neo(config: Config) -> Fields:
    layers = config.size("num_hidden_layers")
    every_other, full = [[["global", "local"], layers // 2]], [[["global"], layers]]
    types = config.keys.get("attention_types") or every_other
    if types not in (every_other, full) or (types == every_other and layers % 2):
        raise config.refuse("attention_types", types, f"{every_other} or {full}")
    return {
        **sizes(config),
        **wide(config),
        **_tied(config, default=True),
        "window": config.size("window_size", 256) if types == every_other else 0,
        "full_attention_every": 2,
        "qkv_bias": False,
    }


def _opt(config: Config) -> Fields:
    config.nothing_but("word_embed_proj_dim", config.size("hidden_size"))
    config.nothing_but("layer_norm_elementwise_affine", allowed=True)
    seq = config.size("max_position_embeddings", 2048)
    return {
        **sizes(config),
        **_tied(config, default=True),
        "ffn": config.size("ffn_dim"),
        "bias": config.flag("enable_bias", default=True),
        "num_positions": seq + 2,  # OPT numbers positions from 2, so its table has two more rows
        "final_norm": config.flag("do_layer_norm_before", default=True)
        and not config.flag("_remove_final_layer_norm", default=False),
    }


def _bloom(config: Config) -> Fields:
    return {
        **sizes(config, seq=config.size("seq_length", 2048)),
        **_tied(config, default=True),
        "positions": "alibi",
        "embedding_norm": True,
    }


def _gpt_neox(config: Config) -> Fields:
    return {
        **sizes(config),
        **attention_bias(config, default=True),
        **_tied(config, default=False),
        "ffn": config.size("intermediate_size"),
        "positions": "rotary",
    }


def _gptj(config: Config) -> Fields:
    return {
        **sizes(config),
        **wide(config, "n_inner"),
        **_tied(config, default=False),
        "positions": "rotary",
        "norms_per_layer": 1,
        "qkv_bias": False,
        "out_bias": False,
        "head_bias": True,
    }


def _phi(config: Config) -> Fields:
    return {
        **sizes(config),
        **_tied(config, default=False),
        "kv_heads": config.size("num_key_value_heads", config.size("num_attention_heads")),
        "head_size": config.size("head_dim", 0) or None,
        "ffn": config.size("intermediate_size"),
        "positions": "rotary",
        "norms_per_layer": 1,
        "qk_norm": config.flag("qk_layernorm", default=False),
        "head_bias": True,
    }


def _falcon(config: Config) -> Fields:
    heads, newer = config.size("num_attention_heads"), config.flag("new_decoder_architecture", default=False)
    older = 1 if config.flag("multi_query", default=True) else heads
    parallel = config.flag("parallel_attn", default=True)
    norms = config.size("num_ln_in_parallel_attn", 2 if newer else 1) if parallel else 2
    return {
        **sizes(config),
        **_tied(config, default=True),
        "kv_heads": config.size("num_kv_heads", heads) if newer else older,
        "ffn": config.size("ffn_hidden_size", 4 * config.size("hidden_size")),
        "positions": "alibi" if config.flag("alibi", default=False) else "rotary",
        "norms_per_layer": norms,
        "bias": config.flag("bias", default=False),
    }


def _starcoder2(config: Config) -> Fields:
    return {
        **sizes(config, seq=4096),
        **_tied(config, default=True),
        **sliding_window(config),
        "kv_heads": config.size("num_key_value_heads", 2),
        "head_size": config.size("head_dim", 0) or None,
        "ffn": config.size("intermediate_size"),
        "positions": "rotary",
        "bias": config.flag("use_bias", default=True),
    }


def _cohere(config: Config) -> Fields:
    return {
        **sizes(config, seq=8192),
        **attention_bias(config),
        **_tied(config, default=True),
        "kv_heads": config.size("num_key_value_heads", config.size("num_attention_heads")),
        "head_size": config.size("head_dim", 0) or None,
        "ffn": config.size("intermediate_size"),
        "gated": True,
        "positions": "rotary",
        "norms_per_layer": 1,
        "norm_bias": False,
        "qk_norm": "width" if config.flag("use_qk_norm", default=False) else False,
        "bias": False,
    }


def _cohere2(config: Config) -> Fields:
    window = sliding_window(config, default=4096, every=4)
    return {**_cohere(config), **window, "qk_norm": False}


def _bert(config: Config) -> Fields:
    config.nothing_but("add_cross_attention", allowed=False)
    config.nothing_but("position_embedding_type", allowed="absolute")
    heads: dict[str, Fields] = {
        "BertModel": {"pooler": True, "lm_head": False},
        "BertForMaskedLM": {"head_transform": True, "head_bias": True},
    }
    architectures = config.keys.get("architectures") or ["BertModel"]
    built = architectures[0] if isinstance(architectures, list) else None
    if built not in heads:
        raise config.refuse("architectures", architectures, " or ".join(heads))
    return {
        **sizes(config, seq=512),
        **heads[built],
        **_tied(config, default=True),
        "ffn": config.size("intermediate_size"),
        "final_norm": False,
        "embedding_norm": True,
        "token_types": config.size("type_vocab_size", 2),
    }


READERS: dict[str, Callable[[Config], Fields]] = {
    "bert": _bert,
    "bloom": _bloom,
    "codegen": _gptj,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "opt": _opt,
    "phi": _phi,
    "starcoder2": _starcoder2,
}
