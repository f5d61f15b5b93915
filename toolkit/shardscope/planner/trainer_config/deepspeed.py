"""A layout as DeepSpeed's JSON configuration, with the names from its documentation."""

from __future__ import annotations

import json
from typing import Any

from shardscope.errors import SpecError
from shardscope.planner.trainer_config.config import TrainerConfig, partial_recomputation
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

_FILE = "ds_config.json"
_OFFLOADED = {"optimizer": ("optimizer",), "states": ("optimizer", "param"), "all": ("optimizer", "param")}
"""Model states that each setting of `Layout.offload` moves to the host; other settings move none."""

_BUCKET, _LIVE, _AHEAD = 500_000_000, 1_000_000_000, 50_000_000
"""DeepSpeed's defaults, in elements, which predictions of its memory assume (`analytic.memory.FRAMEWORKS`)."""


_ON_CPU = {"adamw": "deepspeed.ops.adam.DeepSpeedCPUAdam (AdamW by default)"}
"""Optimizers that DeepSpeed accepts with ZeRO, and the optimizer that it expects if states are offloaded."""


def deepspeed_config(model: Transformer, layout: Layout) -> TrainerConfig:
    """Return the JSON for a data-parallel layout, with ZeRO and offloading of model states.

    Raises:
        SpecError: The layout splits the model, or has a precision that DeepSpeed lacks.
    """
    for name in ("tensor", "pipeline", "context", "expert"):
        if getattr(layout, name) > 1:
            raise SpecError(
                f"{name}={getattr(layout, name)} cannot be written for DeepSpeed yet, only data parallelism; plan with "
                f"fix={{'{name}': 1}}, or software='megatron-core'"
            )
    text = json.dumps(_settings(layout), indent=2)
    return TrainerConfig(f"DeepSpeed, {_FILE}", text, _remarks(model, layout))


def _settings(layout: Layout) -> dict[str, Any]:
    half = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}.get(layout.precision)
    if half is None and layout.precision != "fp32":
        raise SpecError(
            f"precision={layout.precision!r} is not an option of DeepSpeed; use fp32, bf16-mixed or fp16-mixed"
        )
    return {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        **({half: {"enabled": True}} if half else {}),
        "zero_optimization": _zero(layout),
        **_other_optimizers(layout),
        **({"activation_checkpointing": {"cpu_checkpointing": True}} if _moves_activations(layout) else {}),
    }


def _moves_activations(layout: Layout) -> bool:
    return layout.offload in {"activations", "all"}


def _other_optimizers(layout: Layout) -> dict[str, Any]:
    """Return the settings that let DeepSpeed use optimizers other than Adam, which it rejects by default with ZeRO."""
    if layout.optimizer.name in _ON_CPU:
        return {}
    return {
        **({"zero_allow_untested_optimizer": True} if layout.zero else {}),
        **({"zero_force_ds_cpu_optimizer": False} if layout.offload in _OFFLOADED else {}),
    }


def _zero(layout: Layout) -> dict[str, Any]:
    parts = _OFFLOADED.get(layout.offload, ())
    return {
        "stage": layout.zero,
        **({"reduce_bucket_size": _BUCKET} if layout.zero else {}),
        **(
            {"stage3_max_live_parameters": _LIVE, "stage3_prefetch_bucket_size": _AHEAD}
            if layout.zero == 3
            else {}
        ),
        **{f"offload_{part}": {"device": "cpu", "pin_memory": True} for part in parts},
    }


def _remarks(model: Transformer, layout: Layout) -> tuple[str, ...]:
    recompute = {
        "none": "without activation checkpointing",
        "selective": "with only its attention recomputed",
        "full": "with activation checkpointing (for Hugging Face, model.gradient_checkpointing_enable())",
    }[layout.recompute]
    moved: tuple[str, ...] = ()
    if _moves_activations(layout):
        recompute = "with each layer called by deepspeed.checkpointing.checkpoint"
        configure = f"deepspeed.checkpointing.configure(None, deepspeed_config={_FILE!r})"
        moved = (f"Before that, it calls {configure}, without which activations stay on the GPU.",)
    attention = "fused" if layout.flash_attention else "plain"
    optimizer = layout.optimizer.label
    if layout.offload in _OFFLOADED:
        optimizer = _ON_CPU.get(layout.optimizer.name, optimizer)
    return (
        f"The model's code runs {attention} attention, {recompute}, on sequences of {model.seq:,} tokens.",
        *moved,
        *partial_recomputation(layout, "gradient_checkpointing_enable()"),
        f"It passes {optimizer} to deepspeed.initialize.",
    )
