"""Bytes of activations: those that a layer saves for its backward pass, and temporary ones at the peaks of a step.

Saved activations are counted in bytes per token and layer, separately for tensors that tensor parallelism shards and
tensors that it replicates. Korthikanti et al. 2022 (arXiv 2205.05198, equations 1 to 6) give these bytes per layer, for
s tokens per sequence, b sequences, hidden size h, a heads and t tensor-parallel ranks:

    no parallelism                       sbh (34 + 5as/h)
    tensor parallelism                   sbh (10 + 24/t + 5as/(ht))
    tensor and sequence parallelism      sbh (34 + 5as/h) / t
    selective recomputation              the same without 5as/h
    full recomputation                   2sbh

The functions here return the same values in these cases. They sum the bytes of the tensors that norms, linear layers,
core attention and the activation function save. They also cover grouped-query attention, gated feed-forward layers,
latent attention, mixtures of experts, flash attention (which saves a float32 log-sum-exp per row instead of the 5as/h),
other dtypes, and training without dropout.

The peak of a step, when most activations are saved, is either at the loss on the last stage (`at_the_loss`) or in the
backward pass of a layer (`in_a_layer`). These functions return the temporary bytes in addition to saved activations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.memory.frameworks import Framework
from shardscope.analytic.memory.states import ElementBytes
from shardscope.spec.layout import RECOMPUTE_NAMES
from shardscope.spec.model import Mixture, Transformer

Floats = npt.NDArray[np.float64]
SELECTIVE, FULL = RECOMPUTE_NAMES.index("selective"), RECOMPUTE_NAMES.index("full")
LOGSUMEXP_BYTES = FLOAT32_BYTES = 4
MASK_BYTES = 1
"""Bytes of one element of a dropout mask."""


class PerToken(NamedTuple):
    """Bytes saved per token in one layer, split by whether tensor parallelism shards or replicates them."""

    whole: float
    """Bytes that every tensor-parallel rank holds, unless sequence parallelism shards them."""
    split: float
    """Bytes that tensor parallelism shards."""
    whole_always: float = 0.0
    """Bytes that every tensor-parallel rank holds even with sequence parallelism: tokens sent to experts."""
    keys: float = 0.0
    """Bytes of keys and values; tensor-parallel ranks in excess of the key-value heads hold copies."""

    def plus(self, other: PerToken) -> PerToken:
        """Return the sum, field by field."""
        return PerToken(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@lru_cache(maxsize=256)
def attention_per_token(model: Transformer, recipe: ElementBytes, framework: Framework) -> PerToken:
    """Return the bytes per token that the attention half of a layer saves (norm, linear layers, dropout).

    Core attention is not included.
    """
    act, product = recipe.activation, recipe.product
    normed = act * (1 + framework.norm_copies)
    whole = _around(model, recipe, framework)
    copied = act * framework.attention_copies
    if model.latent is not None:
        latent, heads = model.latent, model.heads
        head = latent.nope_size + latent.rope_size
        narrow = (act + product) * (latent.query_rank + latent.kv_rank) + act * latent.rope_size
        split = act * heads * (2 * head + latent.value_size) + (product + copied) * heads * latent.value_size
        return PerToken(whole + narrow, split)
    before = normed if model.qk_norm else 0  # queries and keys before their norms, beside those after
    split = model.head_size * model.heads * (act + product + copied + before)
    return PerToken(whole, split, keys=model.head_size * model.kv_heads * (2 * act + before))


def _around(model: Transformer, recipe: ElementBytes, framework: Framework, *, shared: bool = False) -> int:
    """Return the bytes per token that half a layer saves around its linear layers.

    These are the input of its norm, the input of its first linear layer, the mask of the final dropout, and the input
    of the norm of its output, if there is one. With `shared`, the first two are counted with the other half.
    """
    normed = recipe.activation * (1 + framework.norm_copies)
    first = 0 if shared else normed + recipe.product
    return model.hidden * (
        first + MASK_BYTES * framework.dropout + (normed if model.norms_per_layer == 4 else 0)
    )


@lru_cache(maxsize=256)
def feed_forward_per_token(
    model: Transformer, recipe: ElementBytes, framework: Framework, *, mixed: bool
) -> PerToken:
    """Return the bytes per token that the feed-forward half of a layer saves (norm, linear layers, dropout).

    If `mixed`, the feed-forward half is a mixture of experts.
    """
    whole = _around(model, recipe, framework, shared=model.norms_per_layer == 1)
    inner = inner_per_width(model, recipe, framework)
    mixture = model.mixture
    if not mixed or mixture is None:
        return PerToken(whole, inner * model.ffn)
    sent = (
        mixture.active * model.hidden * recipe.product
    )  # tokens sorted by expert; routing weights enter the activation function
    routing = 4 * mixture.experts  # float32 probabilities
    split = inner * mixture.shared_ffn + inner * mixture.active * mixture.ffn
    return PerToken(whole + routing, split, sent)


def outside_core(model: Transformer, recipe: ElementBytes, framework: Framework, *, mixed: bool) -> PerToken:
    """Return the activation bytes per token that one layer keeps for its backward pass, excluding core attention."""
    attention = attention_per_token(model, recipe, framework)
    return attention.plus(feed_forward_per_token(model, recipe, framework, mixed=mixed))


def every_other_product(model: Transformer, recipe: ElementBytes) -> PerToken:
    """Return the bytes per token that a dense layer saves if every other matrix product is recomputed.

    Saved are the layer's input, the output of attention, and the outputs of matrix products 1, 3, 5 and 7: queries,
    values, the first feed-forward product, and the feed-forward output (torchtitan, activation_checkpoint.py).
    """
    width = model.heads * (model.latent.value_size if model.latent else model.head_size)
    return PerToken(
        whole=2.0 * recipe.activation * model.hidden,
        split=float(recipe.activation * (2 * width + model.ffn)),
        keys=float(recipe.activation * model.kv_heads * model.head_size),
    )


def entry(model: Transformer, recipe: ElementBytes, *, tokens: Floats, divided: Floats) -> Floats:
    """Return the bytes of one layer's input, which is all that full recomputation saves.

    Args:
        model: The model.
        recipe: Bytes per element.
        tokens: Tokens of one micro-batch on one context rank.
        divided: Number of tensor-parallel ranks over which sequence parallelism shards the input; 1 without it.
    """
    return np.asarray(recipe.activation * model.hidden * tokens / divided)


def inner_per_width(model: Transformer, recipe: ElementBytes, framework: Framework) -> int:
    """Return the bytes that the activation function saves per token and unit of inner width: its inputs and output."""
    inputs = framework.gated_tensors - 1 if model.gated else 1
    return recipe.activation * inputs + recipe.product


@lru_cache(maxsize=256)
def core_per_token(
    model: Transformer, recipe: ElementBytes, framework: Framework, *, flash: bool
) -> tuple[float, float]:
    """Return the bytes that core attention saves, per token and per pair of tokens; tensor parallelism shards both."""
    act, heads = recipe.activation, model.heads
    if flash:
        return float(LOGSUMEXP_BYTES * heads), 0.0
    dropped = MASK_BYTES + act  # the mask and the output; only some frameworks model dropout
    return 0.0, float(heads * (act + framework.dropout * dropped))  # after the softmax


def per_layer(
    part: PerToken,
    core: tuple[float, float],
    *,
    tokens: Floats,
    span: Floats,
    tensor: Floats,
    divided: Floats,
    key_heads: int,
) -> Floats:
    """Return the bytes that one layer saves for `tokens` tokens.

    Args:
        part: Bytes per token saved outside core attention.
        core: Result of `core_per_token`; zeros if core attention is recomputed.
        tokens: Tokens of one micro-batch on one context rank.
        span: Tokens that each token attends to on one context rank.
        tensor: t, the tensor-parallel degree.
        divided: t with sequence parallelism, else 1.
        key_heads: Number of key-value heads.
    """
    split = (part.split + core[0] + core[1] * span) / tensor + part.keys / np.minimum(tensor, key_heads)
    return np.asarray(tokens * (part.whole / divided + split + part.whole_always))


def core(
    model: Transformer,
    recipe: ElementBytes,
    framework: Framework,
    *,
    flash: bool,
    context: npt.ArrayLike,
    tokens: Floats,
    span: Floats,
    tensor: Floats,
    divided: Floats,
) -> Floats:
    """Return the bytes that core attention saves in one layer.

    With context parallelism, these include the copies of the output that ring attention saves.
    """
    inner = core_per_token(model, recipe, framework, flash=flash)
    nothing = PerToken(0.0, 0.0)
    once = per_layer(nothing, inner, tokens=tokens, span=span, tensor=tensor, divided=divided, key_heads=1)
    if not framework.ring_copies:
        return once
    width = model.heads * (model.latent.value_size if model.latent else model.head_size)
    copy = framework.ring_copies * (recipe.activation * width + LOGSUMEXP_BYTES * model.heads * flash)
    return once + copy * tokens / tensor * (np.asarray(context) > 1)


def activation_bytes_per_layer(
    model: Transformer,
    *,
    micro_batch: npt.ArrayLike = 1,
    tensor: npt.ArrayLike = 1,
    context: npt.ArrayLike = 1,
    sequence_parallel: npt.ArrayLike = False,
    recompute: str = "none",
    flash_attention: bool = False,
    mixed: bool = False,
    recipe: ElementBytes,
    framework: Framework,
) -> Floats:
    """Return the bytes that one layer saves for one micro-batch on one rank. Degrees and sizes may be arrays.

    Args:
        model: The model.
        micro_batch: b, sequences per micro-batch.
        tensor: t, the tensor-parallel degree.
        context: Context-parallel degree.
        sequence_parallel: Whether activations that tensor parallelism replicates are sharded along the sequence.
        recompute: Which activations are recomputed: ``none``, ``selective`` (core attention) or ``full`` (all except
            the layer's input).
        flash_attention: Whether attention is one fused kernel, which does not save attention scores.
        mixed: Whether the layer has a mixture of experts.
        recipe: Bytes per element.
        framework: Framework whose conventions apply.

    Source:
        Korthikanti et al. 2022, equations 1 to 6, and table 2.
    """
    degree = np.asarray(tensor, float)
    divided = np.where(sequence_parallel, degree, 1.0)
    span = model.seq / np.asarray(context, float)
    tokens = np.asarray(micro_batch) * span
    if recompute == "full":
        return entry(model, recipe, tokens=tokens, divided=divided)
    part = outside_core(model, recipe, framework, mixed=mixed)
    scale = {"tokens": tokens, "span": span, "tensor": degree, "divided": divided}
    outside = per_layer(part, (0.0, 0.0), **scale, key_heads=model.kv_heads)
    if recompute == "selective" and not flash_attention:
        return outside
    return outside + core(model, recipe, framework, flash=flash_attention, context=context, **scale)


def logit_bytes(framework: Framework, recipe: ElementBytes) -> tuple[int, int]:
    """Return `Framework.logits_bytes` and `Framework.logits_later` for the precision of `recipe`."""
    if recipe.activation < FLOAT32_BYTES or framework.float32_logits is None:
        return framework.logits_bytes, framework.logits_later
    return framework.float32_logits


def at_the_loss(
    model: Transformer,
    recipe: ElementBytes,
    framework: Framework,
    *,
    tokens: Floats,
    tensor: Floats,
    divided: Floats,
) -> Floats:
    """Return the temporary bytes in the backward pass of the output projection.

    These are the logits, which tensor parallelism shards along the vocabulary, and three tensors of the hidden size:
    the input and output of the final norm, and a gradient. With sequence parallelism, the input of the projection and
    its gradient are also gathered (Korthikanti et al. 2022, section 4.2.2).
    """
    width, _ = logit_bytes(framework, recipe)
    logits = width * model.vocab * tokens / (1.0 if framework.whole_logits else tensor)
    hidden = recipe.activation * model.hidden * tokens
    return np.asarray(logits + 3 * hidden / divided + 2 * hidden * (divided > 1))


def in_a_layer(
    model: Transformer, recipe: ElementBytes, *, tokens: Floats, tensor: Floats, divided: Floats
) -> Floats:
    """Return the temporary bytes in the backward pass of a dense feed-forward layer.

    These are the gradients of the activation function's inputs and of the residual. The gradient of the down
    projection's input is not counted, because it replaces that input, which is no longer needed.
    """
    width = (1 + model.gated) * model.ffn
    return np.asarray(recipe.activation * tokens * (width / tensor + model.hidden / divided))


def in_a_mixture(
    model: Transformer,
    mixture: Mixture,
    recipe: ElementBytes,
    framework: Framework,
    *,
    expert: npt.ArrayLike,
    tokens: Floats,
    tensor: Floats,
    divided: Floats,
) -> Floats:
    """Return the temporary bytes while a mixture of experts runs.

    These are the copies of routed tokens or the gradients of the experts' activation functions, whichever is larger,
    and the gradient of the residual.
    """
    copies = np.where(np.asarray(expert) > 1, framework.routed_copies, 2) * mixture.active * model.hidden
    width = (1 + model.gated) * (mixture.active * mixture.ffn + mixture.shared_ffn)
    return np.asarray(
        recipe.activation * tokens * (np.maximum(copies, width / tensor) + model.hidden / divided)
    )


def in_the_attention(
    model: Transformer, recipe: ElementBytes, *, tokens: Floats, span: Floats, tensor: Floats
) -> Floats:
    """Return the temporary bytes in the backward pass of attention with stored scores.

    These are the gradients of the softmax's input and output.
    """
    return np.asarray(2 * recipe.activation * model.heads * span * tokens / tensor)
