"""The layout that Megatron's arguments describe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardscope.analytic.recomputation import layers_of_stage
from shardscope.errors import SpecError
from shardscope.measure.calibrate.logs.arguments import Arguments, count, flag, is_count, is_set
from shardscope.spec.units import listed

_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stages of `data_parallel_sharding_strategy`, which Megatron's own FSDP follows."""
_DEGREES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
_VIRTUAL = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
_OF_CHUNK = "num_layers_per_virtual_pipeline_stage"
_OPTIMIZERS = {"adam": {}, "adamw": {}, "sgd": {"optimizer": "sgd"}, "muon": {"optimizer": "muon"}}
"""Columns by `optimizer`; a layout's default is AdamW."""
_FLASH = ("use_flash_attn", *(f"use_flash_attn_{kind}" for kind in ("v1", "v2", "triton", "builder")))
_WITHOUT_EMBEDDINGS = "type:transformer|embedding"
"""DeepSpeed's partition method in which the embeddings at both ends count as one layer each."""


def layout_of(arguments: Arguments, name: str) -> dict[str, Any]:
    """Return the columns of a layout.

    Args:
        arguments: Megatron's arguments, with at least the model's sizes and the batches.
        name: Name of the log, for messages.

    Raises:
        SpecError: An argument has a value that no `Layout` expresses, or contradicts another.
    """
    degrees = {ours: _count(arguments, theirs, name, default=1) for ours, theirs in _DEGREES.items()}
    layers, virtual = int(arguments["num_layers"]), _virtual_stages(arguments, degrees["pipeline"])
    _check_stages(arguments, layers, degrees["pipeline"])
    _check_experts(arguments, degrees["tensor"])
    data = _replicas(arguments, degrees, name)
    return {
        **degrees,
        "data": data,
        "micro_batch": int(arguments["micro_batch_size"]),
        "global_batch": int(arguments["global_batch_size"]),
        **_sharding(arguments, data * degrees["context"]),
        "schedule": "interleaved" if virtual > 1 else "1f1b",
        "virtual_stages": virtual,
        **_recompute(arguments, layers_of_stage(layers, degrees["pipeline"] * virtual)),
        "sequence_parallel": flag(arguments, "sequence_parallel"),
        "precision": _precision(arguments),
        "flash_attention": _has_fused_attention(arguments),
        **_optimizer(arguments),
    }


def _count(arguments: Arguments, key: str, name: str, *, default: int = 0) -> int:
    """Return an argument that is a positive integer, or `default` if the log does not contain it; 0 if it is off."""
    value = arguments.get(key, str(default))
    if not is_count(value) or int(value) < 1:
        raise SpecError(
            f"rows={name!r} states {key}={value[:40]}, which is not a number of ranks; give the whole log"
        )
    return int(value)


def _virtual_stages(arguments: Arguments, stages: int) -> int:
    """Return the number of stages on each pipeline rank.

    Raises:
        SpecError: The stages do not divide the layers, the arguments contradict each other about the number of stages,
            or micro-batches do not run in groups of one per pipeline rank.
    """
    if stages == 1:
        return 1
    found = _stated_stages(arguments, stages)
    group = arguments.get("microbatch_group_size_per_vp_stage", "None")
    if found > 1 and group not in {"None", str(stages)}:
        raise SpecError(
            f"microbatch_group_size_per_vp_stage={group} is not the pipeline's {stages} stages, which a Layout cannot "
            f"express; give rows of runs without it, or with {stages}"
        )
    return found


def _stated_stages(arguments: Arguments, stages: int) -> int:
    counted = (f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss"))
    layers = int(arguments["num_layers"]) + sum(flag(arguments, key) for key in counted)
    stated = {key: count(arguments[key], key) for key in _VIRTUAL if is_set(arguments, key)}
    if is_set(arguments, _OF_CHUNK):
        of_chunk = count(arguments[_OF_CHUNK], _OF_CHUNK)
        if of_chunk == 0 or layers % (stages * of_chunk):
            raise SpecError(
                f"{_OF_CHUNK}={of_chunk} with {stages} pipeline stages does not divide {layers} layers; give the log "
                "as it was written"
            )
        stated[_OF_CHUNK] = layers // (stages * of_chunk)
    if len(set(stated.values())) > 1:
        said = listed(f"{key}={arguments[key]}" for key in stated)
        raise SpecError(f"{said} contradict each other; give the original, unedited log")
    found = next(iter(stated.values()), 1)
    is_uneven = any(is_set(arguments, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if found > 1 and layers % (stages * found) and not is_uneven:
        raise SpecError(
            f"{next(iter(stated))}={found} with {stages} pipeline stages does not divide {layers} layers; give the log "
            "as it was written"
        )
    return found


def _check_stages(arguments: Arguments, layers: int, stages: int) -> None:
    """Reject end stages unless they have as many layers as the other stages, or both one layer less, as in a layout."""
    if stages == 1:
        return
    _check_embeddings(arguments)
    ends = [arguments.get(f"decoder_{end}_pipeline_num_layers", "None") for end in ("first", "last")]
    if ends == ["None", "None"]:
        return
    each = layers_of_stage(layers, stages)
    allowed = each - 1 if layers + 2 == each * stages else each
    if ends != [str(allowed)] * 2:
        raise SpecError(
            f"decoder_first_pipeline_num_layers={ends[0]} and decoder_last_pipeline_num_layers={ends[1]} put numbers "
            f"of layers on the first and last of {stages} pipeline stages that a Layout cannot express; give rows of "
            f"runs without them, or with {allowed} for both"
        )


def _check_embeddings(arguments: Arguments) -> None:
    """Reject pipelines that count the embeddings as a layer at one end only, or are split in another way."""
    keys = [f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")]
    counted = [flag(arguments, key) for key in keys]
    if counted[0] != counted[1]:
        raise SpecError(
            f"{keys[0]}={counted[0]} with {keys[1]}={counted[1]} puts a number of layers on one end of the pipeline "
            "that a Layout cannot express; give rows of runs with both or neither"
        )
    if (method := arguments.get("pp_partition_method", "None")) not in {"None", _WITHOUT_EMBEDDINGS}:
        raise SpecError(
            f"pp_partition_method={method} may put numbers of layers on pipeline stages that a Layout cannot express; "
            f"give rows of runs without it, or with {_WITHOUT_EMBEDDINGS!r}"
        )


def _check_experts(arguments: Arguments, tensor: int) -> None:
    degree = arguments.get("expert_tensor_parallel_size", "None")
    if is_set(arguments, "num_experts") and degree not in {"None", str(tensor)}:
        raise SpecError(
            f"expert_tensor_parallel_size={degree} differs from tensor_model_parallel_size={tensor}, which a Layout "
            "cannot express; give rows of runs in which both agree"
        )


def _sharding(arguments: Arguments, ranks: int) -> dict[str, int]:
    """Return the ZeRO stage, and the number of ranks over which it shards if this is not all ranks."""
    zero = _zero(arguments)
    instances = arguments.get("num_distributed_optimizer_instances", "1")
    if zero == 0 or instances in {"1", "None"}:
        return {"zero": zero}
    if not is_count(instances) or int(instances) < 1 or ranks % int(instances):
        raise SpecError(
            f"num_distributed_optimizer_instances={instances[:40]} does not divide the {ranks} ranks that share a "
            "model's parameters; give the whole log"
        )
    return {"zero": zero, "shard": ranks // int(instances)}


def _zero(arguments: Arguments) -> int:
    if flag(arguments, "use_torch_fsdp2"):
        return 3 if flag(arguments, "torch_fsdp2_reshard_after_forward", default=True) else 2
    if flag(arguments, "use_megatron_fsdp") or flag(arguments, "use_custom_fsdp"):
        strategy = arguments.get("data_parallel_sharding_strategy", "no_shard")
        if strategy not in _SHARDING:
            raise SpecError(
                f"data_parallel_sharding_strategy={strategy!r} is not known; the stages of {', '.join(_SHARDING)} are"
            )
        return _SHARDING[strategy]
    return int(flag(arguments, "use_distributed_optimizer"))


def _replicas(arguments: Arguments, degrees: Mapping[str, int], name: str) -> int:
    others = degrees["tensor"] * degrees["pipeline"] * degrees["context"]
    if "world_size" not in arguments:
        if "data_parallel_size" in arguments:
            return _count(arguments, "data_parallel_size", name)
        raise SpecError(
            "Megatron's arguments name neither data_parallel_size nor world_size; give the whole log"
        )
    ranks = _count(arguments, "world_size", name)
    if ranks % others:
        raise SpecError(
            f"rows={name!r} states world_size={ranks}, which is not a multiple of the {others} ranks of one replica "
            "(tensor x pipeline x context); give the whole log"
        )
    stated = _count(arguments, "data_parallel_size", name, default=ranks // others)
    if stated != ranks // others:
        raise SpecError(
            f"rows={name!r} states data_parallel_size={stated}, but world_size={ranks} makes {ranks // others} "
            f"replicas of {others} ranks (tensor x pipeline x context); give the whole log"
        )
    return stated


def _recompute(arguments: Arguments, layers: int) -> dict[str, Any]:
    """Return the recomputation settings; ``--recompute-num-layers`` is a number of layers only with
    ``--recompute-method block``.

    Args:
        arguments: Megatron's arguments.
        layers: Number of layers on the largest stage.
    """
    granularity, method = _granularity(arguments), arguments.get("recompute_method", "None")
    if granularity == "selective":
        modules = arguments.get("recompute_modules", "None")
        if modules != "None" and re.findall(r"[\w.]+", modules) != ["core_attn"]:
            raise SpecError(
                f"recompute_modules={modules} recomputes other parts of a layer than its core attention, which a "
                "Layout cannot express; give rows of runs with ['core_attn'] alone"
            )
    if method not in {"None", "uniform", "block"}:
        raise SpecError(f"recompute_method={method} is not known; uniform and block are")
    if granularity != "full" or method != "block":
        return {"recompute": granularity}
    stated = arguments.get("recompute_num_layers", "None")
    if not is_count(stated):
        raise SpecError(
            f"recompute_num_layers={stated[:40]} does not say how many layers recompute_method=block "
            "recomputes; give the whole log"
        )
    if int(stated) == 0:
        return {"recompute": "none"}
    return {"recompute": "full", "recompute_layers": int(stated) if int(stated) < layers else 0}


def _granularity(arguments: Arguments) -> str:
    """Return ``none``, ``selective`` or ``full``; before 2022, only ``full`` existed, under other names."""
    stated = arguments.get("recompute_granularity", "None")
    if stated not in {"None", "selective", "full"}:
        raise SpecError(f"recompute_granularity={stated} is not known; selective and full are")
    if stated != "None":
        return stated
    has_old_method = "recompute_granularity" not in arguments and is_set(arguments, "recompute_method")
    if has_old_method or flag(arguments, "checkpoint_activations"):
        return "full"
    return "selective" if flag(arguments, "recompute_activations") else "none"


def _precision(arguments: Arguments) -> str:
    if not {"bf16", "fp16"} & arguments.keys():
        raise SpecError("Megatron's arguments name neither bf16 nor fp16; give the whole log")
    if arguments.get("fp8", "None") not in {"None", "False"} or any(
        flag(arguments, f"fp8_{kind}") for kind in ("e4m3", "hybrid")
    ):
        return "fp8-mixed"
    return "bf16-mixed" if flag(arguments, "bf16") else "fp16-mixed" if flag(arguments, "fp16") else "fp32"


def _has_fused_attention(arguments: Arguments) -> bool:
    if arguments.get("attention_backend", "").rpartition(".")[2] in {"unfused", "local"}:
        return False
    is_flash = any(flag(arguments, key) for key in _FLASH)
    return is_flash or arguments.get("transformer_impl") == "transformer_engine"


def _optimizer(arguments: Arguments) -> dict[str, str]:
    """Return the optimizer, unless it is AdamW, and the location of its states, unless they are on the device."""
    stated = arguments.get("optimizer", "adam")
    if stated not in _OPTIMIZERS:
        raise SpecError(
            f"optimizer={stated} cannot be expressed by rows; those of {', '.join(_OPTIMIZERS)} can"
        )
    offload = {"offload": "optimizer"} if flag(arguments, "optimizer_cpu_offload") else {}
    return {**_OPTIMIZERS[stated], **offload}
