"""The measured step in a log of Megatron-LM or torchtitan, with the settings that the log contains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from shardscope.analytic.recomputation import layers_of_stage
from shardscope.errors import DataError, SpecError
from shardscope.spec.model import Transformer

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ARGUMENT = re.compile(r"(\w+) \.{3,} (.*\S)")
_START = re.compile(r"-{3,} arguments -{3,}")
_PADDED_VOCAB = re.compile(r"padded vocab .*\(new size: (\d+)\)")
"""A later line, because Megatron pads the vocabulary only after it has printed its arguments."""
_NUMBER = r"(\d[\d,]*(?:\.\d*)?)"
_MEGATRON_STEP = re.compile(rf"\biteration +(\d+) */.*?elapsed time per iteration \(ms\): {_NUMBER}")
_TITAN_STEP = re.compile(rf"\bstep: +(\d+) .*\btps: +{_NUMBER}")
_WINDOW = re.compile(r"\(?(\d+), ?0\)?")
"""Tokens before and after a token that it attends to."""
_WARM_UP = 2
"""Logged steps that are left out at the start, in which kernels are compiled and buffers allocated."""
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stages of `data_parallel_sharding_strategy`, which Megatron's own FSDP follows."""
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


def row_of_log(text: str, name: str, given: Transformer | None = None) -> Mapping[str, Any]:
    """Return the row that a log measures: the median over its steps after the first two.

    A log of Megatron-LM states its arguments, and so its model and layout; one of torchtitan states neither.

    Args:
        text: The log.
        name: Its name, for messages and as the row's label.
        given: The model that the log is said to be of, if any.

    Raises:
        DataError: The log has no steps of Megatron or torchtitan, too few, or those of several runs.
        SpecError: Megatron's arguments are incomplete, or contradict the given model.
    """
    plain = _COLOURS.sub("", text)
    if steps := _MEGATRON_STEP.findall(plain):
        arguments = dict(_ARGUMENT.findall(plain))
        if vocab := _PADDED_VOCAB.search(plain):
            arguments["padded_vocab_size"] = vocab[1]
        if (runs := len(_START.findall(plain))) > 1:
            raise DataError(f"rows={name!r} has the arguments of {runs} runs; give one file per run")
        settings = _megatron(arguments, name, given) if arguments else {}
        return {"label": name, "software": "megatron-core", **settings, "step_time_ms": _typical(steps, name)}
    if steps := _TITAN_STEP.findall(plain):
        return {"label": name, "software": "torchtitan", "tokens_per_s_per_device": _typical(steps, name)}
    raise DataError(
        f"rows={name!r} has no step of Megatron ('iteration 10/ 100 | ... elapsed time per iteration (ms): ...') or "
        "torchtitan ('step: 10 ... tps: 6,667'); give such a log, or a CSV file"
    )


def _typical(steps: Sequence[tuple[str, str]], name: str) -> float:
    """Return the median of what was logged after the warm-up, of pairs of a step's number and its value."""
    numbers = [int(number) for number, _ in steps]
    for before, after in pairwise(numbers):
        if after < before:
            raise DataError(
                f"rows={name!r} goes back from step {before} to {after}, so it has several runs; give one file per run"
            )
    logged = sorted(set(numbers))
    if len(logged) <= _WARM_UP:
        raise DataError(
            f"rows={name!r} has {len(logged)} logged step{'s' * (len(logged) > 1)}, and the first {_WARM_UP} are left "
            f"out as warm-up; give a log of at least {_WARM_UP + 1}"
        )
    return median(float(value.replace(",", "")) for number, value in steps if int(number) >= logged[_WARM_UP])


def _megatron(arguments: Mapping[str, str], name: str, given: Transformer | None) -> dict[str, Any]:
    lacking = [key for key in _NEEDED if not arguments.get(key, "").isdigit()]
    if lacking:
        raise SpecError(
            f"rows={name!r} states Megatron's arguments without {', '.join(lacking)}; give the whole log"
        )
    _check_model(arguments, name, given)
    degrees = {ours: _count(arguments, theirs, name, default=1) for ours, theirs in _DEGREES.items()}
    layers, virtual = (
        int(arguments["num_layers"]),
        arguments.get("virtual_pipeline_model_parallel_size", "None"),
    )
    _check_stages(arguments, layers, degrees["pipeline"])
    held = int(virtual) if virtual.isdigit() and int(virtual) > 1 else 1
    return {
        **_model(arguments),
        "seq": int(arguments["seq_length"]),
        **degrees,
        "data": _replicas(arguments, degrees, name),
        "micro_batch": int(arguments["micro_batch_size"]),
        "global_batch": int(arguments["global_batch_size"]),
        "zero": _zero(arguments),
        "schedule": "interleaved" if held > 1 else "1f1b",
        "virtual_stages": held,
        **_recompute(arguments, layers_of_stage(layers, degrees["pipeline"] * held)),
        "sequence_parallel": _is_on(arguments, "sequence_parallel"),
        "precision": _precision(arguments),
        "flash_attention": _is_on(arguments, "use_flash_attn")
        or arguments.get("transformer_impl") == "transformer_engine",
    }


def _count(arguments: Mapping[str, str], key: str, name: str, *, default: int = 0) -> int:
    """Return an argument that is a positive integer, or `default` if the log does not state it; 0 for none."""
    value = arguments.get(key, str(default))
    if not value.isdigit() or int(value) < 1:
        raise SpecError(
            f"rows={name!r} states {key}={value}, which is not a number of ranks; give the whole log"
        )
    return int(value)


def _is_on(arguments: Mapping[str, str], name: str) -> bool:
    return arguments.get(name) == "True"


def _check_model(arguments: Mapping[str, str], name: str, given: Transformer | None) -> None:
    if given is None:
        return
    logged, told = (int(arguments["num_layers"]), int(arguments["hidden_size"])), (given.layers, given.hidden)
    if logged != told:
        raise SpecError(
            f"rows={name!r} is of {logged[0]} layers of {logged[1]}, but model={given.name!r} has {told[0]} layers of "
            f"{told[1]}; give the model that was trained, or omit it"
        )


def _check_stages(arguments: Mapping[str, str], layers: int, stages: int) -> None:
    """Refuse end stages with numbers of layers other than a layout's: as many as on all stages, or one less on both."""
    ends = [arguments.get(f"decoder_{end}_pipeline_num_layers", "None") for end in ("first", "last")]
    if stages == 1 or ends == ["None", "None"]:
        return
    each = layers_of_stage(layers, stages)
    allowed = each - 1 if layers + 2 == each * stages else each
    if ends != [str(allowed)] * 2:
        raise SpecError(
            f"decoder_first_pipeline_num_layers={ends[0]} and decoder_last_pipeline_num_layers={ends[1]} put numbers "
            f"of layers on the first and last of {stages} pipeline stages that a Layout cannot express; give rows of "
            f"runs without them, or with {allowed} for both"
        )


def _zero(arguments: Mapping[str, str]) -> int:
    if _is_on(arguments, "use_torch_fsdp2"):
        return 3
    if _is_on(arguments, "use_megatron_fsdp") or _is_on(arguments, "use_custom_fsdp"):
        strategy = arguments.get("data_parallel_sharding_strategy", "no_shard")
        if strategy not in _SHARDING:
            raise SpecError(
                f"data_parallel_sharding_strategy={strategy!r} is not known; the stages of {', '.join(_SHARDING)} are"
            )
        return _SHARDING[strategy]
    return int(_is_on(arguments, "use_distributed_optimizer"))


def _replicas(arguments: Mapping[str, str], degrees: Mapping[str, int], name: str) -> int:
    if "data_parallel_size" in arguments:
        return _count(arguments, "data_parallel_size", name)
    others = degrees["tensor"] * degrees["pipeline"] * degrees["context"]
    if "world_size" not in arguments:
        raise SpecError(
            "Megatron's arguments name neither data_parallel_size nor world_size; give the whole log"
        )
    ranks = _count(arguments, "world_size", name)
    if ranks % others:
        raise SpecError(
            f"rows={name!r} states world_size={ranks}, which is not a multiple of the {others} ranks of one replica "
            "(tensor x pipeline x context); give the whole log"
        )
    return ranks // others


def _recompute(arguments: Mapping[str, str], layers: int) -> dict[str, Any]:
    """Return what the run recomputes; ``--recompute-num-layers`` counts layers only with ``--recompute-method block``.

    Args:
        arguments: Megatron's arguments.
        layers: Number of layers on the largest stage.
    """
    granularity = arguments.get("recompute_granularity", "None")
    if granularity != "full" or arguments.get("recompute_method") != "block":
        return {"recompute": "none" if granularity == "None" else granularity}
    count = arguments.get("recompute_num_layers", "None")
    if not count.isdigit():
        raise SpecError(
            f"recompute_num_layers={count} does not say how many layers recompute_method=block recomputes; give the "
            "whole log"
        )
    if int(count) == 0:
        return {"recompute": "none"}
    return {"recompute": "full", "recompute_layers": int(count) if int(count) < layers else 0}


def _precision(arguments: Mapping[str, str]) -> str:
    if arguments.get("fp8", "None") not in {"None", "False"}:
        return "fp8-mixed"
    return (
        "bf16-mixed" if _is_on(arguments, "bf16") else "fp16-mixed" if _is_on(arguments, "fp16") else "fp32"
    )


def _model(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the model, unless the arguments do not describe it.

    This is so for a mixture of experts, an unknown vocabulary, and an irregular order of layers with windows.
    """
    hidden, heads = int(arguments["hidden_size"]), int(arguments["num_attention_heads"])
    vocab = arguments.get("padded_vocab_size", "None")
    if arguments.get("num_experts", "None") != "None" or not vocab.isdigit():
        return {}
    every = arguments.get("window_attn_skip_freq", "None")
    if every != "None" and not every.isdigit():
        return {}
    optional = {
        "kv_heads": arguments.get("num_query_groups") if _is_on(arguments, "group_query_attention") else None,
        "ffn": arguments.get("ffn_hidden_size"),
        "head_size": arguments.get("kv_channels"),
        "full_attention_every": every,
    }
    sizes = {name: int(value) for name, value in optional.items() if value is not None and value.isdigit()}
    window = _WINDOW.fullmatch(arguments.get("window_size", ""))
    model = Transformer(
        name=f"gpt-{arguments['num_layers']}x{hidden}", layers=int(arguments["num_layers"]), hidden=hidden,
        heads=heads, seq=int(arguments["seq_length"]), vocab=int(vocab),
        gated=_is_on(arguments, "swiglu"),
        tied=not _is_on(arguments, "untie_embeddings_and_output_weights"),
        positions="rotary" if arguments.get("position_embedding_type") == "rope" else "learned",
        norm="rmsnorm" if arguments.get("normalization") == "RMSNorm" else "layernorm",
        bias=arguments.get("add_bias_linear") != "False", qk_norm=_is_on(arguments, "qk_layernorm"),
        qkv_bias=True if _is_on(arguments, "add_qkv_bias") else None,
        window=int(window[1]) + 1 if window else 0, **sizes,
    )  # fmt: skip
    return {"model": model}
