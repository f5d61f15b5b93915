"""The measured step in a log of Megatron-LM or torchtitan, with the settings that the log contains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import median
from typing import Any

from shardscope.errors import DataError, SpecError
from shardscope.spec.model import Transformer

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ARGUMENT = re.compile(r"(\w+) \.{3,} (.*\S)")
_MEGATRON_STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
_TITAN_STEP = re.compile(r"\bstep: +\d+ .*\btps: +([\d,.]+)")
_WARM_UP = 2
"""Logged steps that are left out at the start, in which kernels are compiled and buffers allocated."""
_DEGREES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
_NEEDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
)


def row_of_log(text: str, name: str) -> Mapping[str, Any]:
    """Return the row that a log measures: the median over its steps after the first two.

    A log of Megatron-LM states its arguments, and so its model and layout; one of torchtitan states neither.

    Raises:
        DataError: The log has no steps of Megatron or torchtitan.
        SpecError: Megatron's arguments are incomplete.
    """
    plain = _COLOURS.sub("", text)
    if times := [float(found) for found in _MEGATRON_STEP.findall(plain)]:
        arguments = dict(_ARGUMENT.findall(plain))
        settings = _megatron(arguments, name) if arguments else {}
        return {"label": name, "software": "megatron-core", **settings, "step_time_ms": median(_warm(times))}
    if rates := [float(found.replace(",", "")) for found in _TITAN_STEP.findall(plain)]:
        return {"label": name, "software": "torchtitan", "tokens_per_s_per_device": median(_warm(rates))}
    raise DataError(
        f"rows={name!r} has no step of Megatron ('elapsed time per iteration (ms): ...') or torchtitan "
        "('step: 10 ... tps: 6,667'); give such a log, or a CSV file"
    )


def _warm(values: list[float]) -> list[float]:
    return values[_WARM_UP:] or values[-1:]


def _megatron(arguments: Mapping[str, str], name: str) -> dict[str, Any]:
    lacking = [key for key in _NEEDED if key not in arguments]
    if lacking:
        raise SpecError(
            f"rows={name!r} states Megatron's arguments without {', '.join(lacking)}; give the whole log"
        )
    degrees = {ours: int(arguments.get(theirs, 1)) for ours, theirs in _DEGREES.items()}
    layers, virtual = (
        int(arguments["num_layers"]),
        arguments.get("virtual_pipeline_model_parallel_size", "None"),
    )
    is_interleaved = virtual.isdigit() and int(virtual) > 1
    return {
        **_model(arguments),
        **degrees,
        "data": _replicas(arguments, degrees),
        "micro_batch": int(arguments["micro_batch_size"]),
        "global_batch": int(arguments["global_batch_size"]),
        "zero": int(_is_on(arguments, "use_distributed_optimizer")),
        "schedule": "interleaved" if is_interleaved else "1f1b",
        "virtual_stages": int(virtual) if is_interleaved else 1,
        "recompute": _recompute(arguments, layers),
        "sequence_parallel": _is_on(arguments, "sequence_parallel"),
        "precision": _precision(arguments),
        "flash_attention": _is_on(arguments, "use_flash_attn")
        or arguments.get("transformer_impl") == "transformer_engine",
    }


def _is_on(arguments: Mapping[str, str], name: str) -> bool:
    return arguments.get(name) == "True"


def _replicas(arguments: Mapping[str, str], degrees: Mapping[str, int]) -> int:
    if "data_parallel_size" in arguments:
        return int(arguments["data_parallel_size"])
    others = degrees["tensor"] * degrees["pipeline"] * degrees["context"]
    if "world_size" not in arguments:
        raise SpecError(
            "Megatron's arguments name neither data_parallel_size nor world_size; give the whole log"
        )
    return int(arguments["world_size"]) // others


def _recompute(arguments: Mapping[str, str], layers: int) -> str:
    granularity = arguments.get("recompute_granularity", "None")
    if granularity == "None":
        return "none"
    count = arguments.get("recompute_num_layers", "None")
    if (
        granularity == "full"
        and arguments.get("recompute_method") == "block"
        and count.isdigit()
        and int(count) < layers
    ):
        raise SpecError(
            f"recompute_num_layers={count} recomputes some layers only, which a layout cannot say; give rows of runs "
            "that recompute all layers or none"
        )
    return granularity


def _precision(arguments: Mapping[str, str]) -> str:
    if arguments.get("fp8", "None") not in {"None", "False"}:
        return "fp8-mixed"
    return (
        "bf16-mixed" if _is_on(arguments, "bf16") else "fp16-mixed" if _is_on(arguments, "fp16") else "fp32"
    )


def _model(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the model, unless the arguments do not describe it: a mixture of experts, or an unknown vocabulary."""
    hidden, heads = int(arguments["hidden_size"]), int(arguments["num_attention_heads"])
    if arguments.get("num_experts", "None") != "None" or "padded_vocab_size" not in arguments:
        return {}
    optional = {
        "kv_heads": arguments.get("num_query_groups") if _is_on(arguments, "group_query_attention") else None,
        "ffn": arguments.get("ffn_hidden_size"),
    }
    sizes = {name: int(value) for name, value in optional.items() if value is not None and value.isdigit()}
    model = Transformer(
        name=f"gpt-{arguments['num_layers']}x{hidden}", layers=int(arguments["num_layers"]), hidden=hidden,
        heads=heads, seq=int(arguments["seq_length"]), vocab=int(arguments["padded_vocab_size"]),
        gated=_is_on(arguments, "swiglu"),
        tied=not _is_on(arguments, "untie_embeddings_and_output_weights"),
        positions="rotary" if arguments.get("position_embedding_type") == "rope" else "learned",
        norm="rmsnorm" if arguments.get("normalization") == "RMSNorm" else "layernorm",
        bias=arguments.get("add_bias_linear") != "False", **sizes,
    )  # fmt: skip
    return {"model": model}
