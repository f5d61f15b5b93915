"""A layout as flags of torchtitan, with the names from `torchtitan/config/configs.py`."""

from __future__ import annotations

from typing import Any

from shardscope.calibration.software import SOFTWARE
from shardscope.errors import SpecError
from shardscope.planner.trainer_config.config import TrainerConfig, flags, partial_recomputation
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer
from shardscope.spec.units import plural

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Names of classes in `torch.distributed.pipelining.schedules`, without ``Schedule``."""
_OPTIMIZERS = ("adamw", "muon")
_CASTS = {"fp32": "float32", "bf16-mixed": "bfloat16", "bf16-autocast": "bfloat16"}


def torchtitan_config(model: Transformer, layout: Layout, *, is_compiled: bool = False) -> TrainerConfig:
    """Return the flags for the degrees of a layout; the model itself is selected by name in torchtitan.

    Args:
        model: The model.
        layout: The layout.
        is_compiled: Whether the prediction is for a model and a loss that are compiled.

    Raises:
        SpecError: torchtitan cannot run the layout.
    """
    _check(model, layout)
    settings: dict[str, Any] = {
        f"parallelism.{name}": value for name, value in _degrees(model, layout).items()
    }
    if layout.tensor > 1:
        settings |= _switch("parallelism", "enable_sequence_parallel", is_on=layout.sequence_parallel)
    settings |= _training(model, layout)
    settings |= _switch("compile", "enable", is_on=is_compiled)
    if (
        layout.pipeline > 1 or layout.expert > 1
    ):  # torchtitan uses CUDA graphs by default, but refuses to capture these
        settings["training.disable_cuda_graphs"] = True
    return TrainerConfig("torchtitan, flags of run_train.sh", flags(settings), _remarks(layout))


def _check(model: Transformer, layout: Layout) -> None:
    """Reject what torchtitan's own checks reject, even if a plan for FSDP2 could run it.

    Raises:
        SpecError: torchtitan rejects the layout, its sequences or its optimizer.
    """
    if refused := SOFTWARE["torchtitan"].shipped.refuses(layout, model):
        raise SpecError(
            f"torchtitan refuses {' and '.join(refused)}; to search only what it runs, plan with "
            "software='torchtitan' and leave these axes out of fix"
        )
    parts = (layout.tensor if layout.sequence_parallel else 1) * (
        2 * layout.context if layout.context > 1 else 1
    )
    if layout.micro_batch * model.seq % parts:
        raise SpecError(
            f"the {layout.micro_batch * model.seq:,} tokens of a micro-batch are not a multiple of {parts}, as "
            f"tensor={layout.tensor} and context={layout.context} need in torchtitan; use other degrees or sequences"
        )
    if layout.optimizer.name not in _OPTIMIZERS:
        raise SpecError(
            f"optimizer={layout.optimizer.name!r} is not one of torchtitan's; use one of {', '.join(_OPTIMIZERS)}"
        )


def _switch(section: str, name: str, *, is_on: bool) -> dict[str, Any]:
    """Return an explicit flag for on or off, independent of the trainer's default; tyro negates flags by ``no_``."""
    return {f"{section}.{name}" if is_on else f"{section}.no_{name}": True}


def _training(model: Transformer, layout: Layout) -> dict[str, Any]:
    """Return the batch in tokens and the precisions.

    torchtitan keeps weights in float32 and casts them when they are gathered.
    """
    if layout.precision not in _CASTS:
        raise SpecError(
            f"precision={layout.precision!r} is not an option of torchtitan's training section; use one of "
            f"{', '.join(_CASTS)}"
        )
    if not layout.flash_attention:
        raise SpecError("flash_attention=False is not an option of torchtitan; use flash_attention=True")
    return {
        "training.max_context_length": model.seq,
        "training.num_tokens_per_microbatch_per_dp_rank": layout.micro_batch * model.seq,
        "training.num_tokens_per_train_step": layout.global_batch * model.seq,
        "training.dtype": "float32",
        "training.mixed_precision_param": _CASTS[layout.precision],
        "training.mixed_precision_reduce": "float32",
        "training.enable_cpu_offload": layout.offload == "states",
    }


def _degrees(model: Transformer, layout: Layout) -> dict[str, Any]:
    replicate, shard = _replicas(layout)
    return {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tensor,
        "context_parallel_degree": layout.context,
        "pipeline_parallel_degree": layout.pipeline,
        **_stages(model, layout),
        **_experts(layout, shard * layout.context),
    }


def _experts(layout: Layout, shards: int) -> dict[str, Any]:
    """Return the degree of expert parallelism, whose ranks torchtitan takes first from the sharding ranks."""
    if layout.expert == 1:
        return {}
    if layout.tensor > 1:
        raise SpecError(
            f"expert={layout.expert} with tensor={layout.tensor} would not split each expert over tensor ranks in "
            "torchtitan, as predicted; use tensor=1 or expert=1"
        )
    if shards % layout.expert:
        raise SpecError(
            f"expert={layout.expert} does not divide the {plural(shards, 'rank')} over which torchtitan shards "
            "parameters; use zero=2 or 3, with a shard that it divides"
        )
    return {"expert_parallel_degree": layout.expert}


def _replicas(layout: Layout) -> tuple[int, int]:
    """Return the degrees of replication and sharding; torchtitan shards over context ranks and data ranks."""
    if layout.zero == 1 and layout.data * layout.context > 1:
        raise SpecError(
            "zero=1 is not an option of torchtitan, which shards gradients, too; plan with software='torchtitan' and "
            "leave zero out of fix"
        )
    if layout.zero == 0:
        if layout.context > 1:
            raise SpecError(
                f"zero=0 with context={layout.context} is not an option of torchtitan, which always shards over "
                "context ranks; use zero=2 or 3"
            )
        return layout.data, 1
    if layout.shard % layout.context:
        raise SpecError(
            f"shard={layout.shard} is not a multiple of context={layout.context}, over which torchtitan always shards; "
            f"use shard=0 or a multiple of {layout.context}"
        )
    shard = layout.shard // layout.context or layout.data
    return layout.data // shard, shard


def _stages(model: Transformer, layout: Layout) -> dict[str, Any]:
    if layout.pipeline == 1:
        return {}
    stages = layout.pipeline * layout.virtual_stages
    if model.layers % stages:
        raise SpecError(
            f"layers={model.layers} are not a multiple of {stages} stages; torchtitan takes such a "
            "division as module_fqns_per_model_part, which Shardscope does not write: choose pipeline x "
            "virtual_stages so that they are"
        )
    return {
        "pipeline_parallel_schedule": _SCHEDULES[layout.schedule],
        "pipeline_parallel_layers_per_stage": model.layers // stages,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        # By default 1: torchtitan would fill and drain the pipeline for each micro-batch.
        "num_pp_microbatches": layout.num_micro_batches,
    }


def _remarks(layout: Layout) -> tuple[str, ...]:
    kept = "no" if layout.recompute == "none" else layout.recompute
    return (
        "Releases before August 2026 have other names for the tokens of a micro-batch and of a step.",
        f"Choose {kept} activation checkpointing and {layout.optimizer.label} in the configuration of the model.",
        *["Choose a model with FlexAttention, the only attention that context ranks share in torchtitan."]
        * (layout.context > 1),
        *partial_recomputation(
            layout, "torchtitan has no setting for it, and its full activation checkpointing"
        ),
        "Predictions assume one loss over all tokens of a micro-batch; ChunkedLossWrapper needs less memory.",
    )
