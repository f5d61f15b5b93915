"""Conversion of a Hugging Face ``config.json`` on disk to a `Transformer` description.

Each reader handles one ``model_type``, and describes the model that transformers 5 builds from the config
(`AutoModelForCausalLM.from_config`; for BERT, the class in ``architectures``). Optional keys have the defaults of
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec.model.transformer import LatentAttention, Mixture, Transformer

Fields = dict[str, Any]


class _Config:
    """The keys and values of a config, and its path for messages. A key whose value is null counts as missing."""

    def __init__(self, keys: Fields, path: Path) -> None:
        self.keys, self.path = keys, path

    def size(self, key: str, default: int | None = None) -> int:
        """Return the value of a key, an integer of at least 0; the key is required if there is no default."""
        value = self.keys.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise SpecError(
                f"{self.path} has no {key!r}, which model_type={quoted(self.keys['model_type'])} needs; add it"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(key, value, "an integer of 0 or more")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.keys.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return default if value is None else value

    def nothing_but(self, key: str, allowed: Any) -> None:
        """Reject any value of `key` other than `allowed`, the only value that a `Transformer` can describe."""
        if self.keys.get(key) not in (None, allowed):
            raise self.refuse(key, self.keys[key], repr(allowed))

    def refuse(self, key: str, value: Any, allowed: str) -> SpecError:
        return SpecError(f"{self.path} has {key}={quoted(value)}, which is not supported; only {allowed} is")


def from_hf(path: str | Path) -> Transformer:
    """Return the transformer that a ``config.json`` describes.

    Args:
        path: The file, or the folder that contains it.

    Raises:
        SpecError: There is no such file, it is not a JSON object, its ``model_type`` is unknown, a key is missing, or
            the model has a feature that a `Transformer` cannot describe.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    keys = _read(file)
    kind = keys.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise unknown_name(f"{file}: model_type", kind, READERS)
    name = str(keys.get("_name_or_path") or kind).rstrip("/").rpartition("/")[2]
    return Transformer(name=name, **READERS[kind](_Config(keys, file)))


def _read(file: Path) -> Fields:
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"{file} cannot be read ({error.strerror}); give a config.json or its folder"
        ) from error
    except ValueError as error:
        raise SpecError(f"{file} is not JSON ({error}); give the config.json of a model") from error
    if not isinstance(keys, dict):
        raise SpecError(
            f"{file} contains a {type(keys).__name__}; give the config.json of a model, which contains a JSON object"
        )
    return keys


def _gpt2(config: _Config) -> Fields:
    config.nothing_but("add_cross_attention", allowed=False)
    hidden = config.size("n_embd")
    return {
        "layers": config.size("n_layer"),
        "hidden": hidden,
        "heads": config.size("n_head"),
        "ffn": config.size("n_inner", 4 * hidden),
        "vocab": config.size("vocab_size"),
        "seq": config.size("n_positions", 1024),
        "tied": config.flag("tie_word_embeddings", default=True),
    }


def _opt(config: _Config) -> Fields:
    config.nothing_but("word_embed_proj_dim", config.size("hidden_size"))
    config.nothing_but("layer_norm_elementwise_affine", allowed=True)
    seq = config.size("max_position_embeddings", 2048)
    return {
        **_sizes(config),
        "ffn": config.size("ffn_dim"),
        "tied": config.flag("tie_word_embeddings", default=True),
        "bias": config.flag("enable_bias", default=True),
        "seq": seq,
        "num_positions": seq + 2,  # OPT numbers positions from 2, so its table has two more rows
        "final_norm": config.flag("do_layer_norm_before", default=True)
        and not config.flag("_remove_final_layer_norm", default=False),
    }


def _gpt_neox(config: _Config) -> Fields:
    return {
        **_sizes(config),
        **_attention_bias(config, default=True),
        "ffn": config.size("intermediate_size"),
        "tied": config.flag("tie_word_embeddings", default=False),
        "positions": "rotary",
    }


def _bert(config: _Config) -> Fields:
    config.nothing_but("add_cross_attention", allowed=False)
    heads: dict[str, Fields] = {
        "BertModel": {"pooler": True, "lm_head": False},
        "BertForMaskedLM": {"head_transform": True, "head_bias": True},
    }
    architectures = config.keys.get("architectures") or ["BertModel"]
    built = architectures[0] if isinstance(architectures, list) else None
    if built not in heads:
        raise config.refuse("architectures", architectures, " or ".join(heads))
    return {
        **_sizes(config),
        **heads[built],
        "ffn": config.size("intermediate_size"),
        "tied": config.flag("tie_word_embeddings", default=True),
        "final_norm": False,
        "embedding_norm": True,
        "token_types": config.size("type_vocab_size", 2),
    }


def _sizes(config: _Config) -> Fields:
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden": config.size("hidden_size"),
        "heads": config.size("num_attention_heads"),
        "vocab": config.size("vocab_size"),
        "seq": config.size("max_position_embeddings", 2048),
    }


def _attention_bias(config: _Config, *, default: bool = False) -> Fields:
    """Return the fields for the biases of all four attention projections."""
    biased = config.flag("attention_bias", default=default)
    return {"qkv_bias": biased, "out_bias": biased}


def _llama_like(config: _Config) -> Fields:
    """Return the fields that Llama-like models share: rotary positions, RMSNorm, gated feed-forward, no biases."""
    return {
        **_sizes(config),
        "ffn": config.size("intermediate_size"),
        "tied": config.flag("tie_word_embeddings", default=False),
        "gated": True,
        "positions": "rotary",
        "norm": "rmsnorm",
        "bias": False,
    }


def _grouped(config: _Config) -> Fields:
    """Return Llama-like fields with grouped-query attention.

    The default of ``num_key_value_heads`` in transformers depends on the model type, so a config must give this key
    unless its type is llama.
    """
    if config.keys["model_type"] != "llama" and "num_key_value_heads" not in config.keys:
        config.size("num_key_value_heads")
    return {
        **_llama_like(config),
        "kv_heads": config.size("num_key_value_heads", config.size("num_attention_heads")),
        "head_size": config.size("head_dim", 0) or None,
    }


def _llama(config: _Config) -> Fields:
    biased = config.flag("mlp_bias", default=False)
    return {**_grouped(config), **_attention_bias(config), "bias": biased}


def _gemma(config: _Config) -> Fields:
    return {
        **_grouped(config),
        **_attention_bias(config),
        "head_size": config.size("head_dim", 256),
        "tied": config.flag("tie_word_embeddings", default=True),
    }


def _qwen2(config: _Config) -> Fields:
    return {**_grouped(config), "qkv_bias": True}


def _qwen3(config: _Config) -> Fields:
    return {
        **_grouped(config),
        **_attention_bias(config),
        "head_size": config.size("head_dim", 128),
        "qk_norm": True,
    }


def _mixtral(config: _Config) -> Fields:
    mixture = Mixture(
        experts=config.size("num_local_experts"),
        active=config.size("num_experts_per_tok", 2),
        ffn=config.size("intermediate_size"),
    )
    return {**_grouped(config), "mixture": mixture}


def _every_layer_sparse(config: _Config) -> None:
    config.nothing_but("decoder_sparse_step", 1)
    config.nothing_but("mlp_only_layers", [])


def _qwen2_moe(config: _Config) -> Fields:
    _every_layer_sparse(config)
    mixture = Mixture(
        experts=config.size("num_experts"),
        active=config.size("num_experts_per_tok", 4),
        ffn=config.size("moe_intermediate_size"),
        shared_ffn=config.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {**_grouped(config), "qkv_bias": config.flag("qkv_bias", default=True), "mixture": mixture}


def _qwen3_moe(config: _Config) -> Fields:
    _every_layer_sparse(config)
    published = "num_experts" in config.keys  # transformers 5 writes num_local_experts
    mixture = Mixture(
        experts=config.size("num_experts" if published else "num_local_experts"),
        active=config.size("num_experts_per_tok", 8),
        ffn=config.size("moe_intermediate_size"),
    )
    return {**_grouped(config), **_attention_bias(config), "qk_norm": True, "mixture": mixture}


def _deepseek(config: _Config, *, shared_experts: int, dense_layers: int) -> Fields:
    config.nothing_but("attention_bias", allowed=False)
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
    return {**_llama_like(config), "latent": latent, "mixture": mixture}


READERS: dict[str, Callable[[_Config], Fields]] = {
    "bert": _bert,
    "deepseek_v2": partial(_deepseek, shared_experts=2, dense_layers=0),
    "deepseek_v3": partial(_deepseek, shared_experts=1, dense_layers=3),
    "gemma": _gemma,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _grouped,
    "mixtral": _mixtral,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""The reader for each supported ``model_type``."""
