"""A layout as flags of Megatron-LM's `pretrain_gpt.py`, by the names in `megatron/training/arguments.py`."""

from __future__ import annotations

from typing import Any

from shardscope.errors import SpecError
from shardscope.prediction.trainer_config.config import TrainerConfig, flags
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

_OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-mixed": {"bf16": True},
    "fp16-mixed": {"fp16": True},
    "fp8-mixed": {"bf16": True, "fp8-format": "hybrid"},
}
_POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}


def megatron_config(model: Transformer, layout: Layout) -> TrainerConfig:
    """Return the flags for a layout and the sizes of its model.

    Raises:
        SpecError: Megatron-LM has no flags for the layout or the model.
    """
    settings = {
        **_degrees(model, layout),
        **_sharding(layout),
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": layout.global_batch,
        **_recomputation(layout),
        **_choice("precision", layout.precision, _PRECISIONS),
        "optimizer": _choice("optimizer", layout.optimizer.name, _OPTIMIZERS),
        # Megatron-LM offloads with the precision-aware optimizer only.
        **dict.fromkeys(
            ("optimizer-cpu-offload", "use-precision-aware-optimizer"), layout.offload == "optimizer"
        ),
        "attention-backend": "auto" if layout.flash_attention else "unfused",
        **_assumed(layout),
        **_model(model),
    }
    return TrainerConfig(
        "Megatron-LM, flags of pretrain_gpt.py",
        flags(settings),
        (
            f"The {layout.num_devices:,} processes of torchrun make {layout.data:,} replicas.",
            f"Each runs {layout.num_micro_batches:,} micro-batches a step.",
            *["Predictions assume that the backend auto finds fused attention."] * layout.flash_attention,
            f"Add the data and a tokenizer of {model.vocab:,} tokens, and the learning rate.",
        ),
    )


def _assumed(layout: Layout) -> dict[str, Any]:
    """Return what predictions assume of Megatron-Core, also where its own default differs; see `FRAMEWORKS`."""
    return {
        "accumulate-allreduce-grads-in-fp32": layout.precision != "fp32",
        "cross-entropy-loss-fusion": True,
        "hidden-dropout": 0.0,
        "attention-dropout": 0.0,
    }


def _choice(name: str, value: str, known: dict[str, Any]) -> Any:
    if value not in known:
        raise SpecError(f"{name}={value!r} is not an option of Megatron-LM; use one of {', '.join(known)}")
    return known[value]


def _degrees(model: Transformer, layout: Layout) -> dict[str, Any]:
    stages = layout.pipeline * layout.virtual_stages
    if model.layers % stages:
        raise SpecError(
            f"layers={model.layers} are not a multiple of {stages} stages, which Megatron-LM expects; choose pipeline "
            "x virtual_stages so that they are"
        )
    return {
        "tensor-model-parallel-size": layout.tensor,
        "sequence-parallel": layout.sequence_parallel,
        "pipeline-model-parallel-size": layout.pipeline,
        **(
            {"num-virtual-stages-per-pipeline-rank": layout.virtual_stages}
            if layout.virtual_stages > 1
            else {}
        ),
        "context-parallel-size": layout.context,
        **({"expert-model-parallel-size": layout.expert} if layout.expert > 1 else {}),
    }


def _sharding(layout: Layout) -> dict[str, Any]:
    replicas = layout.data * layout.context
    groups = replicas // layout.shard if layout.zero and layout.shard else 1
    return {
        "use-distributed-optimizer": bool(layout.zero),
        **({"num-distributed-optimizer-instances": groups} if groups > 1 else {}),
    }


def _recomputation(layout: Layout) -> dict[str, Any]:
    if layout.recompute != "full":
        return {} if layout.recompute == "none" else {"recompute-granularity": layout.recompute}
    method = ("block", layout.recompute_layers) if layout.recompute_layers else ("uniform", 1)
    return {
        "recompute-granularity": "full",
        "recompute-method": method[0],
        "recompute-num-layers": method[1],
    }


def _model(model: Transformer) -> dict[str, Any]:
    if (
        model.latent is not None
        or model.token_types
        or not model.lm_head
        or model.positions not in _POSITIONS
    ):
        raise SpecError(
            f"model={model.name!r} has parts that pretrain_gpt.py builds from other flags; use a GPT or Llama, with "
            "learned or rotary positions"
        )
    return {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "num-attention-heads": model.heads,
        "kv-channels": model.head_size,
        **(
            {"group-query-attention": True, "num-query-groups": model.kv_heads}
            if model.kv_heads < model.heads
            else {}
        ),
        "ffn-hidden-size": model.ffn,
        "swiglu": model.gated,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "position-embedding-type": _POSITIONS[model.positions],
        "seq-length": model.seq,
        "max-position-embeddings": max(model.seq, model.num_positions),
        "untie-embeddings-and-output-weights": not model.tied,
        "disable-bias-linear": not model.bias,
        "add-qkv-bias": bool(model.qkv_bias) and not model.bias,
        "qk-layernorm": model.qk_norm,
        **_experts(model),
    }


def _experts(model: Transformer) -> dict[str, Any]:
    mixture = model.mixture
    if mixture is None:
        return {}
    dense = mixture.dense_layers
    order = f'"([0]*{dense}+[1]*{model.layers - dense})"'
    return {
        "num-experts": mixture.experts,
        "moe-router-topk": mixture.active,
        "moe-ffn-hidden-size": mixture.ffn,
        **({"moe-shared-expert-intermediate-size": mixture.shared_ffn} if mixture.shared_ffn else {}),
        **({"moe-layer-freq": order} if dense else {}),
    }
