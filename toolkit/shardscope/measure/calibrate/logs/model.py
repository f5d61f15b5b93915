"""The model that Megatron's arguments describe."""

from __future__ import annotations

import re
from typing import Any, Literal

from shardscope.errors import SpecError
from shardscope.measure.calibrate.logs.arguments import Arguments, flag, is_set
from shardscope.spec.model import Transformer

_WINDOW = re.compile(r"\(?(\d+), ?0\)?")
"""Tokens before and after a token that it attends to."""
_POSITIONS: dict[str, Literal["learned", "rotary", "alibi", "none"]] = {
    "learned_absolute": "learned",
    "absolute": "learned",
    "rope": "rotary",
    "rotary": "rotary",
    "mrope": "rotary",
    "yarn": "rotary",
    "alibi": "alibi",
    "none": "none",
}
_NORMS: dict[str, Literal["layernorm", "rmsnorm"]] = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}
_SINKS = {"vanilla": False, "None": False, "learnable": True}
"""Whether each head has a learned score, by `softmax_type`."""


def model_of(arguments: Arguments) -> dict[str, Any]:
    """Return the model, unless the arguments do not describe it.

    This is so for a mixture of experts, an unknown vocabulary, and an irregular order of layers with windows.

    Raises:
        SpecError: The model has a part that no `Transformer` has.
    """
    positions, norm, has_sinks = _positions(arguments), _norm(arguments), _sinks(arguments)
    vocab, every = arguments.get("padded_vocab_size", "None"), arguments.get("window_attn_skip_freq", "None")
    if _is_mixture(arguments) or not vocab.isdigit() or flag(arguments, "multi_latent_attention"):
        return {}
    if every != "None" and not every.isdigit():
        return {}
    hidden, layers = int(arguments["hidden_size"]), int(arguments["num_layers"])
    optional = {
        "kv_heads": _kv_heads(arguments),
        "ffn": arguments.get("ffn_hidden_size"),
        "head_size": arguments.get("kv_channels"),
        "full_attention_every": every,
        "num_positions": arguments.get("max_position_embeddings") if positions == "learned" else None,
    }
    sizes = {name: int(value) for name, value in optional.items() if value is not None and value.isdigit()}
    window = _WINDOW.fullmatch(arguments.get("window_size", ""))
    model = Transformer(
        name=f"gpt-{layers}x{hidden}", layers=layers, hidden=hidden, heads=int(arguments["num_attention_heads"]),
        seq=int(arguments["seq_length"]), vocab=int(vocab), positions=positions, norm=norm, attention_sinks=has_sinks,
        gated=flag(arguments, "swiglu") or flag(arguments, "quick_geglu") or is_set(arguments, "glu_activation"),
        tied=not flag(arguments, "untie_embeddings_and_output_weights"),
        bias=flag(arguments, "add_bias_linear", default=True), qk_norm=flag(arguments, "qk_layernorm"),
        qkv_bias=True if flag(arguments, "add_qkv_bias") else None,
        embedding_norm=flag(arguments, "embed_layernorm"),
        window=int(window[1]) + 1 if window else 0, **sizes,
    )  # fmt: skip
    return {"model": model}


def check_given(arguments: Arguments, name: str, given: Transformer | None) -> None:
    """Refuse a given model that contradicts the arguments, or that is needed and missing.

    Raises:
        SpecError: It differs in its sizes, experts or latent attention.
    """
    _check_latent(arguments, name, given)
    if given is None:
        return
    logged, told = (int(arguments["num_layers"]), int(arguments["hidden_size"])), (given.layers, given.hidden)
    if logged != told:
        raise SpecError(
            f"rows={name!r} is of {logged[0]} layers of {logged[1]}, but model={given.name!r} has {told[0]} layers of "
            f"{told[1]}; give the model that was trained, or omit it"
        )
    if not _is_mixture(arguments) or given.mixture is None:
        return
    for key, known in (("num_experts", given.mixture.experts), ("moe_router_topk", given.mixture.active)):
        if arguments.get(key, str(known)) != str(known):
            raise SpecError(
                f"rows={name!r} states {key}={arguments[key]}, but model={given.name!r} has {known}; give the model "
                "that was trained"
            )


def _check_latent(arguments: Arguments, name: str, given: Transformer | None) -> None:
    if not flag(arguments, "multi_latent_attention"):
        return
    latent = None if given is None else given.latent
    if latent is None or arguments.get("kv_lora_rank", str(latent.kv_rank)) != str(latent.kv_rank):
        raise SpecError(
            f"rows={name!r} states multi_latent_attention=True, whose model its arguments alone do not describe; give "
            "the model that was trained, such as model='deepseek-v3'"
        )


def _is_mixture(arguments: Arguments) -> bool:
    """Return whether layers have experts; DeepSpeed's list of one number of experts for each layer is [1] for none."""
    stated = arguments.get("num_experts", "None")
    if stated in {"None", "[1]", "1", "0"}:
        return False
    if not stated.isdigit():
        raise SpecError(
            f"num_experts={stated} puts experts in some layers only, which a Transformer cannot express; give rows of "
            "runs without"
        )
    return True


def _kv_heads(arguments: Arguments) -> str | None:
    if flag(arguments, "group_query_attention"):
        return arguments.get("num_query_groups")
    return arguments.get("num_key_value_heads")


def _positions(arguments: Arguments) -> Literal["learned", "rotary", "alibi", "none"]:
    if flag(arguments, "use_rotary_position_embeddings"):
        return "rotary"
    stated = arguments.get("position_embedding_type", "learned_absolute").rpartition(".")[2]
    if stated not in _POSITIONS:
        raise SpecError(
            f"position_embedding_type={stated} cannot be expressed by rows; {', '.join(_POSITIONS)} can"
        )
    found = _POSITIONS[stated]
    return found if found != "learned" or flag(arguments, "add_position_embedding", default=True) else "none"


def _norm(arguments: Arguments) -> Literal["layernorm", "rmsnorm"]:
    stated = arguments.get("normalization", "LayerNorm")
    if stated.lower() not in _NORMS:
        raise SpecError(f"normalization={stated} cannot be expressed by rows; LayerNorm and RMSNorm can")
    return _NORMS[stated.lower()]


def _sinks(arguments: Arguments) -> bool:
    stated = arguments.get("softmax_type", "vanilla")
    if stated not in _SINKS:
        raise SpecError(f"softmax_type={stated} cannot be expressed by rows; vanilla and learnable can")
    return _SINKS[stated]
