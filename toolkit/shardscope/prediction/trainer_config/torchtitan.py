"""A layout as flags of torchtitan, by the names of `ParallelismConfig` in `torchtitan/config/configs.py`."""

from __future__ import annotations

from typing import Any

from shardscope.errors import SpecError
from shardscope.prediction.trainer_config.config import TrainerConfig, flags
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Names of classes in `torch.distributed.pipelining.schedules`, without ``Schedule``."""
_CASTS = {"fp32": "float32", "bf16-mixed": "bfloat16", "bf16-autocast": "bfloat16"}


def torchtitan_config(model: Transformer, layout: Layout) -> TrainerConfig:
    """Return the flags for the degrees of a layout; the model is one that torchtitan knows by name.

    Raises:
        SpecError: torchtitan cannot run the layout.
    """
    settings: dict[str, Any] = {
        f"parallelism.{name}": value for name, value in _degrees(model, layout).items()
    }
    settings |= _training(layout)
    return TrainerConfig("torchtitan, flags of run_train.sh", flags(settings), _remarks(model, layout))


def _training(layout: Layout) -> dict[str, Any]:
    """Return the precisions, with which torchtitan keeps weights in float32 and casts them when they are gathered."""
    if layout.precision not in _CASTS:
        raise SpecError(
            f"precision={layout.precision!r} is not an option of torchtitan's training section; use one of "
            f"{', '.join(_CASTS)}"
        )
    if not layout.flash_attention:
        raise SpecError("flash_attention=False is not an option of torchtitan; use flash_attention=True")
    return {
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
        **({"expert_parallel_degree": layout.expert} if layout.expert > 1 else {}),
    }


def _replicas(layout: Layout) -> tuple[int, int]:
    """Return the degrees that replicate and that shard; context ranks shard along with the data ranks."""
    if layout.zero == 1 and layout.data * layout.context > 1:
        raise SpecError(
            "zero=1 is not an option of torchtitan, which shards gradients, too; plan with software='torchtitan'"
        )
    if layout.zero == 0:
        return layout.data, 1
    if layout.shard % layout.context:
        raise SpecError(
            f"shard={layout.shard} is not a multiple of context={layout.context}, over which torchtitan always shards"
        )
    shard = layout.shard // layout.context or layout.data
    return layout.data // shard, shard


def _stages(model: Transformer, layout: Layout) -> dict[str, Any]:
    if layout.pipeline == 1:
        return {}
    stages = layout.pipeline * layout.virtual_stages
    if model.layers % stages:
        raise SpecError(
            f"layers={model.layers} are not a multiple of {stages} stages; torchtitan takes such a division as "
            "module_fqns_per_model_part, which is not written here: choose pipeline x virtual_stages so that they are"
        )
    return {
        "pipeline_parallel_schedule": _SCHEDULES[layout.schedule],
        "pipeline_parallel_layers_per_stage": model.layers // stages,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }


def _remarks(model: Transformer, layout: Layout) -> tuple[str, ...]:
    tokens, whole = layout.micro_batch * model.seq, layout.global_batch * model.seq
    kept = "no" if layout.recompute == "none" else layout.recompute
    return (
        f"Set sequences to {model.seq:,} tokens, a micro-batch to {tokens:,} and a step to {whole:,}.",
        "The names of these three settings differ between releases.",
        f"Choose {kept} activation checkpointing and {layout.optimizer.label} in the configuration of the model.",
    )
