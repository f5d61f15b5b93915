"""Bytes of activations: what a layer saves for its backward pass, and the working memory at the peaks of a step.

Saved activations are counted in bytes per token and layer, separately for parts that tensor parallelism shards and
parts that it replicates.

Korthikanti et al. 2022 (arXiv 2205.05198), equations 1 to 6, with s tokens, b sequences, h hidden, a heads, t ranks:

    whole                sbh (34 + 5as/h)
    tensor               sbh (10 + 24/t + 5as/(ht))
    tensor, sequence     sbh (34 + 5as/h) / t
    selective            the same without 5as/h
    full                 2sbh

They are special cases of the count here, which adds up what each operation saves: norms, linear layers, core attention
and the activation function. It also covers grouped queries, gated layers, latent attention, mixtures of experts, flash
attention (a float32 log-sum-exp of each row in place of the 5as/h), other dtypes and jobs without dropout.

The peak of a step is at one of two moments, both counted on top of all saved activations: the loss on the last stage
(`at_the_loss`), and the backward pass through a layer (`in_a_layer`) while most activations are saved.
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
LOGSUMEXP_BYTES = 4


class PerToken(NamedTuple):
    """Bytes of one token in one layer."""

    whole: float
    """Bytes that are replicated on every tensor-parallel rank, unless the sequence is split over these ranks."""
    split: float
    """Bytes that tensor parallelism shards."""
    whole_always: float = 0.0
    """Bytes that are always replicated on every tensor-parallel rank: tokens sent to experts."""
    keys: float = 0.0
    """Bytes that tensor parallelism shards over at most as many ranks as there are key-value heads; others hold
    copies."""

    def plus(self, other: PerToken) -> PerToken:
        """Return the sum, part by part."""
        return PerToken(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@lru_cache(maxsize=256)
def attention_per_token(model: Transformer, recipe: ElementBytes, framework: Framework) -> PerToken:
    """Bytes per token that norm, attention and residual save, without core attention."""
    act, product, hidden = recipe.activation, recipe.product, model.hidden
    whole = hidden * (
        act + product + framework.dropout
    )  # norm input, matrix-product input, dropout mask after it
    if model.latent is not None:
        latent, heads = model.latent, model.heads
        head = latent.nope_size + latent.rope_size
        narrow = (act + product) * (latent.query_rank + latent.kv_rank) + act * latent.rope_size
        split = act * heads * (2 * head + latent.value_size) + product * heads * latent.value_size
        return PerToken(whole + narrow, split)
    split = model.head_size * model.heads * (act + product)
    return PerToken(whole, split, keys=model.head_size * act * 2 * model.kv_heads)


@lru_cache(maxsize=256)
def feed_forward_per_token(
    model: Transformer, recipe: ElementBytes, framework: Framework, *, mixed: bool
) -> PerToken:
    """Bytes per token that norm, feed-forward layer or mixture, and residual save."""
    act, product, hidden = recipe.activation, recipe.product, model.hidden
    whole = hidden * (act + product + framework.dropout)
    inner = inner_per_width(model, recipe, framework)
    mixture = model.mixture
    if not mixed or mixture is None:
        return PerToken(whole, inner * model.ffn)
    sent = (
        mixture.active * hidden * product
    )  # tokens sorted by expert; routing weights enter the activation function
    routing = 4 * mixture.experts  # float32 probabilities
    split = inner * mixture.shared_ffn + inner * mixture.active * mixture.ffn
    return PerToken(whole + routing, split, sent)


def outside_core(model: Transformer, recipe: ElementBytes, framework: Framework, *, mixed: bool) -> PerToken:
    """Bytes per token that one layer saves, without core attention."""
    attention = attention_per_token(model, recipe, framework)
    return attention.plus(feed_forward_per_token(model, recipe, framework, mixed=mixed))


def entry(model: Transformer, recipe: ElementBytes, *, tokens: Floats, divided: Floats) -> Floats:
    """Bytes of one layer's input, which full recomputation keeps."""
    return np.asarray(recipe.activation * model.hidden * tokens / divided)


def inner_per_width(model: Transformer, recipe: ElementBytes, framework: Framework) -> int:
    """Bytes per token and unit of inner width: the activation function's inputs and output."""
    inputs = framework.gated_tensors - 1 if model.gated else 1
    return recipe.activation * inputs + recipe.product


@lru_cache(maxsize=256)
def core_per_token(
    model: Transformer, recipe: ElementBytes, framework: Framework, *, flash: bool
) -> tuple[float, float]:
    """Bytes that core attention saves per token, and per pair of tokens; tensor parallelism shards both."""
    act, heads = recipe.activation, model.heads
    if flash:
        return float(LOGSUMEXP_BYTES * heads), 0.0
    return 0.0, float(heads * (act + framework.dropout * (1 + act)))  # softmax, mask, dropout output


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
    """Bytes that one layer saves for `tokens`.

    Args:
        part: Bytes per token saved outside core attention.
        core: Result of `core_per_token`; zeros if core attention is recomputed.
        tokens: Tokens of one micro-batch on one context rank.
        span: Tokens that each token attends to on one context rank.
        tensor: t, the tensor-parallel degree.
        divided: t if the sequence is split over the tensor-parallel ranks, else 1.
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
    """Bytes that core attention saves in one layer, including ring attention's output copies over context ranks."""
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
    """Bytes that one layer saves for one micro-batch, on one rank; arguments follow NumPy broadcasting.

    Args:
        model: The model.
        micro_batch: b, sequences per micro-batch.
        tensor: t, the tensor-parallel degree.
        context: Context-parallel degree.
        sequence_parallel: Whether activations that tensor parallelism replicates are sharded along the sequence.
        recompute: ``none``, ``selective`` (core attention) or ``full`` (everything except the layer's input).
        flash_attention: Whether attention scores are never stored.
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


def at_the_loss(
    model: Transformer,
    recipe: ElementBytes,
    framework: Framework,
    *,
    tokens: Floats,
    tensor: Floats,
    divided: Floats,
) -> Floats:
    """Bytes during the output projection's backward pass: logits, the final norm's input and output, and gradients.

    With sequence parallelism, the projection's input and its gradient are gathered meanwhile (Korthikanti et al. 2022,
    section 4.2.2). Logits are sharded over the tensor-parallel ranks (vocabulary parallel).
    """
    logits = framework.logits_bytes * model.vocab * tokens / tensor
    hidden = recipe.activation * model.hidden * tokens
    return np.asarray(logits + 3 * hidden / divided + 2 * hidden * (divided > 1))


def in_a_layer(
    model: Transformer, recipe: ElementBytes, *, tokens: Floats, tensor: Floats, divided: Floats
) -> Floats:
    """Bytes during a dense feed-forward layer's backward pass: gradients of its inner inputs, and of the residual.

    The gradient of the second matrix product's input replaces that input, which is no longer needed.
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
    """Bytes while a mixture runs: copies of routed tokens, or gradients of its experts' inner inputs."""
    copies = np.where(np.asarray(expert) > 1, framework.routed_copies, 2) * mixture.active * model.hidden
    width = (1 + model.gated) * (mixture.active * mixture.ffn + mixture.shared_ffn)
    return np.asarray(
        recipe.activation * tokens * (np.maximum(copies, width / tensor) + model.hidden / divided)
    )


def in_the_attention(
    model: Transformer, recipe: ElementBytes, *, tokens: Floats, span: Floats, tensor: Floats
) -> Floats:
    """Bytes during the backward pass of attention with stored scores: gradients before and after the softmax."""
    return np.asarray(2 * recipe.activation * model.heads * span * tokens / tensor)
