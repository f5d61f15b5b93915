"""A layout as flags of Megatron-LM's `pretrain_gpt.py`, with the names from `megatron/training/arguments.py`."""

from __future__ import annotations

from typing import Any

from shardscope.errors import SpecError
from shardscope.planner.trainer_config.config import TrainerConfig, flags
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer
from shardscope.spec.units import gib_text, plural

_OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-mixed": {"bf16": True},
    "fp16-mixed": {"fp16": True},
    "fp8-mixed": {"bf16": True, "fp8-format": "hybrid"},
}
_MORE_BYTES_PER_LOGIT = 4
"""Bytes per logit of the float32 softmax that the native cross entropy saves (`VocabParallelCrossEntropy`)."""
_POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}


def megatron_config(model: Transformer, layout: Layout) -> TrainerConfig:
    """Return the flags for a layout and the sizes of its model.

    Raises:
        SpecError: Megatron-LM has no flags for the layout or the model.
    """
    if layout.optimizer.name == "muon" and layout.precision == "fp16-mixed":
        raise SpecError(
            "optimizer='muon' with fp16-mixed is refused by Megatron-LM; use precision='bf16-mixed'"
        )
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
        **_window(model, layout),
        **_exchange(model, layout),
    }
    return TrainerConfig("Megatron-LM, flags of pretrain_gpt.py", flags(settings), _remarks(model, layout))


def _remarks(model: Transformer, layout: Layout) -> tuple[str, ...]:
    logits = layout.micro_batch * model.seq * model.vocab / (layout.tensor * layout.context)
    where = "on each device of the last stage" if layout.pipeline > 1 else "on each device"
    loss = (
        "Predictions assume TransformerEngine's cross entropy (--cross-entropy-fusion-impl te), which Megatron-LM of "
        "August 2026 does not accept. The native one needs about 4 bytes more per logit: "
        f"{gib_text(_MORE_BYTES_PER_LOGIT * logits)} {where}."
    )
    micro = layout.num_micro_batches
    return (
        f"The {layout.num_devices:,} torchrun processes form {plural(layout.data, 'replica')} of the model.",
        f"Each replica processes {micro:,} micro-batch{'es' * (micro > 1)} per step.",
        *["Predictions assume that the attention backend `auto` selects fused attention."]
        * layout.flash_attention,
        loss,
        *_remarks_on_messages(layout),
        *["Add --rotary-base if the model's is not 10,000."]
        * (model.positions == "rotary" and model.rotary_base is None),
        f"Add your data, a tokenizer of {model.vocab:,} tokens, the learning rate and --train-iters.",
    )


def _remarks_on_messages(layout: Layout) -> list[str]:
    found = []
    if layout.tensor > 1 or layout.context > 1:
        found.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 is for Hopper and older GPUs; leave it out on newer ones."
        )
    if layout.tensor > 1:
        needed = "" if layout.sequence_parallel else ", which needs sequence_parallel=True"
        found.append(
            "On some devices, such as H100, predictions assume that computation hides part of the tensor-parallel "
            f"messages; --tp-comm-overlap does this{needed}."
        )
    return found


def _assumed(layout: Layout) -> dict[str, Any]:
    """Return the settings that predictions assume for Megatron-Core, even if its defaults differ; see `FRAMEWORKS`."""
    has_replicas = layout.data * layout.context > 1
    return {
        "accumulate-allreduce-grads-in-fp32": layout.precision != "fp32",
        "overlap-grad-reduce": has_replicas,
        "overlap-param-gather": has_replicas and layout.zero == 1,
        "cross-entropy-loss-fusion": True,
        "cross-entropy-fusion-impl": "native",
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
    if replicas // layout.expert % groups:
        raise SpecError(
            f"shard={layout.shard} makes {groups} groups of shards, which do not divide the "
            f"{plural(replicas // layout.expert, 'replica')} of each expert, as Megatron-LM expects; use shard=0, or "
            f"an expert below {layout.expert}"
        )
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
    if parts := [part for part, has in _parts(model).items() if has]:
        raise SpecError(
            f"model={model.name!r} has {', '.join(parts)}, which are not written as flags of pretrain_gpt.py; use "
            "a GPT or Llama, with learned or rotary positions"
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
        **_rotary_base(model),
        "seq-length": model.seq,
        "max-position-embeddings": max(model.seq, model.num_positions),
        "untie-embeddings-and-output-weights": not model.tied,
        "disable-bias-linear": not model.bias,
        "add-qkv-bias": bool(model.qkv_bias) and not model.bias,
        "qk-layernorm": bool(model.qk_norm),
        **_experts(model),
    }


def _rotary_base(model: Transformer) -> dict[str, Any]:
    """Return the base of rotary positions, which Megatron-LM takes as an integer."""
    base = model.rotary_base
    if model.positions != "rotary" or base is None:
        return {}
    if base != int(base):
        raise SpecError(
            f"rotary_base={base} is not an integer, as Megatron-LM's --rotary-base expects; use one"
        )
    return {"rotary-base": int(base)}


def launch_command(layout: Layout, per_node: int) -> str:
    """Return the command that starts `pretrain_gpt.py` on each node, without flags.

    Args:
        layout: The layout.
        per_node: Number of devices in a node.
    """
    own = min(per_node, layout.num_devices)
    nodes = -(-layout.num_devices // own)
    meet = ["--rdzv-backend c10d", "--rdzv-endpoint $MASTER_ADDR:29500"] if nodes > 1 else []
    ordered = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if layout.tensor > 1 or layout.context > 1 else ""
    lines = [f"{ordered}torchrun", f"--nnodes {nodes} --nproc-per-node {own}", *meet, "pretrain_gpt.py"]
    return " \\\n".join(lines)


def _parts(model: Transformer) -> dict[str, bool]:
    """Return the parts that Megatron-LM builds from other flags, if at all, and whether the model has them."""
    mixture = model.mixture
    return {
        "latent attention": model.latent is not None,
        "attention sinks": model.attention_sinks,
        "segment embeddings": bool(model.token_types),
        "a norm after the embedding": model.embedding_norm,
        "no output projection": not model.lm_head,
        "a bias in the output projection": model.head_bias,
        "no final norm": not model.final_norm,
        f"positions={model.positions!r}": model.positions not in _POSITIONS,
        f"norms_per_layer={model.norms_per_layer}": model.norms_per_layer != 2,
        "norms without weights": model.norm == "unweighted",
        "norms without biases": model.norm == "layernorm" and not model.norm_bias,
        "norms of queries and keys with weights for each head": model.qk_norm == "width",
        "attention biases that do not follow from those of other layers": _has_odd_biases(model),
        "biases in the router": mixture is not None and mixture.router_bias,
        "a gate before shared experts": mixture is not None and mixture.shared_gate,
    }


def _has_odd_biases(model: Transformer) -> bool:
    """Return whether the biases are neither all, nor none, nor only those of queries, keys and values."""
    qkv = model.bias if model.qkv_bias is None else model.qkv_bias
    out = model.bias if model.out_bias is None else model.out_bias
    return out != model.bias or qkv < model.bias


def _window(model: Transformer, layout: Layout) -> dict[str, Any]:
    """Return the flags of sliding windows; a window size counts the tokens before and after the current token."""
    if not model.num_windowed_layers:
        return {}
    if layout.context > 1:
        raise SpecError(
            f"context={layout.context} with a window of {model.window} tokens is refused by TransformerEngine, whose "
            "ranks exchange keys and values point to point; use context=1"
        )
    every = model.full_attention_every
    return {
        "window-size": f"{model.window - 1},0",
        **({"window-attn-skip-freq": every} if every else {}),
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


def _exchange(model: Transformer, layout: Layout) -> dict[str, Any]:
    """Return the flags for sending tokens to their experts; Megatron-LM's default gathers all tokens on every rank."""
    if model.mixture is None:
        return {}
    if layout.tensor > 1 and not layout.sequence_parallel:
        raise SpecError(
            f"a model with experts needs sequence parallelism with tensor={layout.tensor} in Megatron-LM; use "
            "sequence_parallel=True"
        )
    return {"moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": True}
