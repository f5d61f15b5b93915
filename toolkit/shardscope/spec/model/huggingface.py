"""Hugging Face's ``config.json`` into a described transformer, read from disk.

Each reader knows one ``model_type`` as built by transformers 5 (`AutoModelForCausalLM.from_config`; for BERT, what
``architectures`` names). What a config may leave out has the default that transformers gives it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardscope.errors import SpecError, unknown_name
from shardscope.spec.model.transformer import LatentAttention, Mixture, Transformer

Fields = dict[str, Any]


class _Config:
    """The keys of a config, and where they come from, for messages."""

    def __init__(self, keys: Fields, path: Path) -> None:
        self.keys, self.path = keys, path

    def __getitem__(self, key: str) -> Any:
        if self.keys.get(key) is None:
            raise SpecError(
                f"{self.path} has no {key!r}, which model_type={self.keys['model_type']!r} needs; add it"
            )
        return self.keys[key]

    def get(self, key: str, default: Any) -> Any:
        value = self.keys.get(key)
        return default if value is None else value

    def refuse(self, key: str, value: Any, allowed: str) -> SpecError:
        return SpecError(
            f"{self.path} has {key}={value!r}, which cannot be described exactly; only {allowed} can"
        )


def from_hf(path: str | Path) -> Transformer:
    """The transformer that a ``config.json`` describes.

    Args:
        path: The file, or the folder that holds it.

    Raises:
        SpecError: There is no such file, it is no JSON object, its ``model_type`` is not known, a key is missing, or it
            asks for something that the description has no field for.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    keys = _read(file)
    kind = keys.get("model_type")
    if kind not in READERS:
        raise unknown_name(f"model_type of {file}", kind, READERS)
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
        raise SpecError(f"{file} is no JSON ({error}); give the config.json of a model") from error
    if not isinstance(keys, dict):
        raise SpecError(
            f"{file} holds a {type(keys).__name__}; give the config.json of a model, which holds an object"
        )
    return keys


def _gpt2(config: _Config) -> Fields:
    hidden = config["n_embd"]
    return {
        "layers": config["n_layer"],
        "hidden": hidden,
        "heads": config["n_head"],
        "ffn": config.get("n_inner", 4 * hidden),
        "vocab": config["vocab_size"],
        "seq": config.get("n_positions", 1024),
        "tied": config.get("tie_word_embeddings", True),
    }


def _opt(config: _Config) -> Fields:
    hidden = config["hidden_size"]
    width = config.get("word_embed_proj_dim", hidden)
    if width != hidden:
        raise config.refuse("word_embed_proj_dim", width, f"hidden_size={hidden}")
    if not config.get("layer_norm_elementwise_affine", True):
        raise config.refuse("layer_norm_elementwise_affine", False, "True")
    seq = config.get("max_position_embeddings", 2048)
    return {
        **_sizes(config),
        "ffn": config["ffn_dim"],
        "tied": config.get("tie_word_embeddings", True),
        "bias": config.get("enable_bias", True),
        "seq": seq,
        "num_positions": seq + 2,  # OPT's positions begin at 2
        "final_norm": config.get("do_layer_norm_before", True)
        and not config.get("_remove_final_layer_norm", False),
    }


def _gpt_neox(config: _Config) -> Fields:
    return {
        **_sizes(config),
        "ffn": config["intermediate_size"],
        "tied": config.get("tie_word_embeddings", False),
        "positions": "rotary",
        "qkv_bias": config.get("attention_bias", True),
    }


def _bert(config: _Config) -> Fields:
    built = (config.get("architectures", None) or ["BertModel"])[0]
    heads: dict[str, Fields] = {
        "BertModel": {"pooler": True, "lm_head": False},
        "BertForMaskedLM": {"head_transform": True, "head_bias": True},
    }
    if built not in heads:
        raise config.refuse("architectures", [built], " and ".join(heads))
    return {
        **_sizes(config),
        **heads[built],
        "ffn": config["intermediate_size"],
        "tied": config.get("tie_word_embeddings", True),
        "final_norm": False,
        "embedding_norm": True,
        "token_types": config.get("type_vocab_size", 2),
    }


def _sizes(config: _Config) -> Fields:
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "vocab": config["vocab_size"],
        "seq": config.get("max_position_embeddings", 2048),
    }


def _llama(config: _Config) -> Fields:
    """What Llama and its many relatives share: rotary positions, RMSNorm, a gated feed-forward layer."""
    biased = config.get("attention_bias", False)
    if biased != config.get("mlp_bias", False):
        raise config.refuse("attention_bias", biased, "the same for attention_bias and mlp_bias")
    return {
        **_sizes(config),
        "kv_heads": config.get("num_key_value_heads", config["num_attention_heads"]),
        "head_size": config.get("head_dim", None),
        "ffn": config["intermediate_size"],
        "tied": config.get("tie_word_embeddings", False),
        "gated": True,
        "positions": "rotary",
        "norm": "rmsnorm",
        "bias": biased,
    }


def _gemma(config: _Config) -> Fields:
    return {
        **_llama(config),
        "head_size": config.get("head_dim", 256),
        "tied": config.get("tie_word_embeddings", True),
    }


def _qwen2(config: _Config) -> Fields:
    return {**_llama(config), "qkv_bias": True}


def _qwen3(config: _Config) -> Fields:
    return {**_llama(config), "head_size": config.get("head_dim", 128), "qk_norm": True}


def _mixtral(config: _Config) -> Fields:
    mixture = Mixture(
        experts=config["num_local_experts"],
        active=config.get("num_experts_per_tok", 2),
        ffn=config["intermediate_size"],
    )
    return {**_llama(config), "mixture": mixture}


def _every_layer_sparse(config: _Config) -> None:
    if config.get("decoder_sparse_step", 1) != 1:
        raise config.refuse("decoder_sparse_step", config["decoder_sparse_step"], "1")
    if config.get("mlp_only_layers", []):
        raise config.refuse("mlp_only_layers", config["mlp_only_layers"], "[]")


def _qwen2_moe(config: _Config) -> Fields:
    _every_layer_sparse(config)
    mixture = Mixture(
        experts=config["num_experts"],
        active=config.get("num_experts_per_tok", 4),
        ffn=config["moe_intermediate_size"],
        shared_ffn=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )
    return {**_llama(config), "qkv_bias": config.get("qkv_bias", True), "mixture": mixture}


def _qwen3_moe(config: _Config) -> Fields:
    _every_layer_sparse(config)
    mixture = Mixture(
        experts=config["num_experts"],
        active=config.get("num_experts_per_tok", 8),
        ffn=config["moe_intermediate_size"],
    )
    return {**_llama(config), "head_size": config.get("head_dim", None), "qk_norm": True, "mixture": mixture}


def _deepseek(config: _Config) -> Fields:
    latent = LatentAttention(
        query_rank=config.get("q_lora_rank", 0),
        kv_rank=config["kv_lora_rank"],
        rope_size=config["qk_rope_head_dim"],
        nope_size=config["qk_nope_head_dim"],
        value_size=config["v_head_dim"],
    )
    width = config["moe_intermediate_size"]
    mixture = Mixture(
        experts=config["n_routed_experts"],
        active=config["num_experts_per_tok"],
        ffn=width,
        shared_ffn=config.get("n_shared_experts", 0) * width,
        dense_layers=config.get("first_k_dense_replace", 0),
    )
    return {**_llama(config), "kv_heads": None, "head_size": None, "latent": latent, "mixture": mixture}


READERS: dict[str, Callable[[_Config], Fields]] = {
    "bert": _bert,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""A reader for every ``model_type`` that is known."""
