"""The model that Megatron's arguments describe."""

from __future__ import annotations

import re
from typing import Any, Literal

from shardscope.errors import SpecError, quoted
from shardscope.measure.calibrate.logs.arguments import Arguments, count, flag, is_count, is_set
from shardscope.spec.model import Transformer

_WINDOW = re.compile(r"[(\[]?(-1|[0-9]{1,12}), ?(?:-1|[0-9]{1,12})[)\]]?")
"""Number of tokens before and after a token to which it attends; -1 for all. A causal mask hides later tokens."""
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
_TOP_K = ("moe_router_topk", "topk")
"""Active experts, in Megatron-LM and in Megatron-DeepSpeed."""
_SHARED = "moe_shared_expert_intermediate_size"
_PATTERN = re.compile(r"\[([01](?:, ?[01]){0,9999})\](?: ?\* ?([0-9]{1,4}))?")
"""One part of a pattern of layers with and without experts."""
_SINKS = {"vanilla": False, "None": False, "learnable": True}
"""Whether each head has a learned attention-sink score, by `softmax_type`."""


def model_of(arguments: Arguments) -> dict[str, Any]:
    """Return the fields of the model; empty if the arguments do not describe it.

    They never describe a mixture of experts, an unknown vocabulary, or an irregular order of layers with windows.

    Raises:
        SpecError: The model has a part that no `Transformer` has.
    """
    positions, norm, has_sinks = _positions(arguments), _norm(arguments), _sinks(arguments)
    vocab, every = arguments.get("padded_vocab_size", "None"), arguments.get("window_attn_skip_freq", "None")
    if _is_mixture(arguments) or vocab == "None" or flag(arguments, "multi_latent_attention"):
        return {}
    if every != "None" and not is_count(every):
        return {}
    hidden, layers = int(arguments["hidden_size"]), int(arguments["num_layers"])
    optional = {
        "kv_heads": _key_of_kv_heads(arguments).rpartition(" ")[2],
        "ffn": "ffn_hidden_size",
        "head_size": "kv_channels",
        "full_attention_every": "window_attn_skip_freq",
        "num_positions": "max_position_embeddings" if positions == "learned" else "",
    }
    sizes = {name: count(arguments[key], key) for name, key in optional.items() if is_set(arguments, key)}
    window = _window(arguments)
    model = Transformer(
        name=f"gpt-{layers}x{hidden}", layers=layers, hidden=hidden, heads=int(arguments["num_attention_heads"]),
        seq=int(arguments["seq_length"]), vocab=count(vocab, "padded_vocab_size"),
        positions=positions, norm=norm, attention_sinks=has_sinks,
        gated=flag(arguments, "swiglu") or flag(arguments, "quick_geglu") or is_set(arguments, "glu_activation"),
        tied=not flag(arguments, "untie_embeddings_and_output_weights"),
        bias=flag(arguments, "add_bias_linear", default=True), qk_norm=flag(arguments, "qk_layernorm"),
        qkv_bias=True if flag(arguments, "add_qkv_bias") else None,
        embedding_norm=flag(arguments, "embed_layernorm"),
        window=window, **sizes,
    )  # fmt: skip
    return {"model": model}


def check_given(arguments: Arguments, name: str, given: Transformer | None) -> None:
    """Reject a given model that contradicts the arguments, or a missing model that is needed.

    Raises:
        SpecError: The model is needed, or differs in a size, its vocabulary (beyond padding), experts or attention.
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
    _check_parts(arguments, name, given)
    pairs = {**_sizes(arguments, given), **_sizes_of_experts(arguments, given)}
    differs = next((said for said, known in pairs.items() if not _agrees(arguments, said, known)), None)
    if differs is not None:
        raise SpecError(
            f"rows={name!r} states {differs}={arguments[differs.rpartition(' ')[2]]}, but model={given.name!r} has "
            f"{pairs[differs]}; give the model that was trained"
        )
    _check_order(arguments, name, given)
    _check_vocabulary(arguments, name, given)


def _check_parts(arguments: Arguments, name: str, given: Transformer) -> None:
    has_latent, has_experts = flag(arguments, "multi_latent_attention"), _is_mixture(arguments)
    for said, has, known, part in (
        ("multi_latent_attention", has_latent, given.latent, "latent attention"),
        ("num_experts", has_experts, given.mixture, "experts"),
    ):
        if has != (known is not None):
            raise SpecError(
                f"rows={name!r} states {said}={arguments.get(said)}, but model={given.name!r} has "
                f"{'no ' if has else ''}{part}; give the model that was trained"
            )


def _sizes(arguments: Arguments, given: Transformer) -> dict[str, int]:
    """Return the values that the model implies for arguments, keyed by texts that end with the arguments' names."""
    found = {"num_attention_heads": given.heads}
    if given.latent is None:
        found["kv_channels"] = given.head_size
        found[_key_of_kv_heads(arguments)] = given.kv_heads
    if given.mixture is None or given.mixture.dense_layers:
        found["ffn_hidden_size"] = given.ffn
    return found


def _sizes_of_experts(arguments: Arguments, given: Transformer) -> dict[str, int]:
    """Return the values that the mixture implies; experts are as wide as dense layers unless arguments set a width."""
    mixture = given.mixture
    if mixture is None:
        return {}
    width = (
        "moe_ffn_hidden_size" if is_set(arguments, "moe_ffn_hidden_size") else "as experts ffn_hidden_size"
    )
    return {
        "num_experts": mixture.experts, **dict.fromkeys(_TOP_K, mixture.active),
        width: mixture.ffn, _SHARED: mixture.shared_ffn,
    }  # fmt: skip


def _agrees(arguments: Arguments, said: str, known: int) -> bool:
    """Return whether an argument has the value that the model implies, or has a default that is not logged."""
    key = said.rpartition(" ")[2]
    if not is_set(arguments, key):
        return key != _SHARED or key not in arguments or known == 0
    return count(arguments[key], key) == known


def _check_order(arguments: Arguments, name: str, given: Transformer) -> None:
    """Reject a mixture of experts unless all layers after the first few have experts."""
    stated = arguments.get("moe_layer_freq", "None")
    if given.mixture is None or stated == "None":
        return
    dense = given.mixture.dense_layers
    if _has_experts(stated, given.layers) != [False] * dense + [True] * (given.layers - dense):
        raise SpecError(
            f"rows={name!r} states moe_layer_freq={quoted(stated)}, but model={given.name!r} has experts in all of "
            f"{given.layers} layers except the first {dense}; give the model that was trained"
        )


def _has_experts(stated: str, layers: int) -> list[bool] | None:
    """Return which layers have experts: every n-th, or as in ``([0]*3+[1]*58)``; None if Megatron cannot read it."""
    if is_count(stated):
        return None if int(stated) == 0 else [layer % int(stated) == 0 for layer in range(layers)]
    found: list[bool] = []
    for part in stated.strip("() ").split("+"):
        match = _PATTERN.fullmatch(part.strip("() "))
        if match is None:
            return None
        flags, times = [each == "1" for each in match[1] if each in "01"], int(match[2] or 1)
        if len(found) + len(flags) * times > layers:
            return None
        found += flags * times
    return found


def _check_vocabulary(arguments: Arguments, name: str, given: Transformer) -> None:
    """Reject a different vocabulary; rows of padding and a few special tokens do not make a difference."""
    stated = arguments.get("padded_vocab_size", "None")
    if stated == "None":
        return
    multiple, degree = (
        count(arguments.get(key, default), key)
        for key, default in (("make_vocab_size_divisible_by", "128"), ("tensor_model_parallel_size", "1"))
    )
    if abs(count(stated, "padded_vocab_size") - given.vocab) > max(multiple * degree, given.vocab // 20):
        raise SpecError(
            f"rows={name!r} states padded_vocab_size={stated}, but model={given.name!r} has a vocabulary of "
            f"{given.vocab}; give the model that was trained, such as model.replace(vocab={stated})"
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
    """Return whether layers have experts; DeepSpeed's list of the number of experts by layer is [1] without experts."""
    stated = arguments.get("num_experts", "None")
    if stated in {"None", "[1]", "1", "0"}:
        return False
    if not is_count(stated):
        raise SpecError(
            f"num_experts={stated} puts experts in some layers only, which a Transformer cannot express; give rows of "
            "runs without"
        )
    return True


def _key_of_kv_heads(arguments: Arguments) -> str:
    """Return a text that ends with the name of the argument for key-value heads."""
    if flag(arguments, "group_query_attention"):
        return "num_query_groups"
    if is_set(arguments, "num_key_value_heads") or "group_query_attention" not in arguments:
        return "num_key_value_heads"
    return "group_query_attention=False with num_attention_heads"


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


def _window(arguments: Arguments) -> int:
    """Return the number of tokens to which a token attends, including itself; 0 for all."""
    stated = arguments.get("window_size", "None")
    if stated == "None":
        return 0
    if (found := _WINDOW.fullmatch(stated)) is None:
        raise SpecError(
            f"window_size={quoted(stated)} is not a pair such as (127, 0); give the original, unedited log"
        )
    return int(found[1]) + 1


def _sinks(arguments: Arguments) -> bool:
    stated = arguments.get("softmax_type", "vanilla")
    if stated not in _SINKS:
        raise SpecError(f"softmax_type={stated} cannot be expressed by rows; vanilla and learnable can")
    return _SINKS[stated]
