"""Work of a transformer block: its matrix products with their times, and the bytes that other operations move.

A device reaches its peak only on large matrices. The time of ``count`` products of (m x k) by (k x n) is

    t = count 2mnk / (peak e) * (1 + w (1/m + 1/n + 1/k))

Here e is the fraction of the peak that very large matrices reach, and w the size at which moving the operands takes
as long as multiplying them. Both are constants of `spec.Calibration`. The bytes / FLOPs of a product are proportional
to 1/m + 1/n + 1/k, so this is the roofline (Williams et al., CACM 2009) with a smooth corner.

Bytes of other operations are those that each operator reads and writes in the forward pass, in the order of Korthikanti
et al. 2022 (arXiv 2205.05198, section 4.1), with 2-byte elements and 1-byte masks: two norms (read and write), two
residual additions with dropout (read two, write one, mask), the activation function, and attention's softmax and
dropout over a s^2 scores if these are not fused into one kernel. The backward pass moves twice as much.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]


NEWTON_SCHULZ_STEPS = 5


class Matmul(NamedTuple):
    """`times` products of an (m x k) by a (k x n) matrix on one device."""

    name: str
    m: Floats
    n: Floats
    k: Floats
    times: Floats

    @property
    def flops(self) -> Floats:
        """FLOPs of the products: multiplications and additions."""
        return np.asarray(2.0 * self.m * self.n * self.k * self.times)

    def seconds(self, rate: float, half_size: float) -> Floats:
        """Time of the products in seconds, at `rate` FLOP/s times a slowdown of 1 + half_size (1/m + 1/n + 1/k)."""
        slowdown = 1.0 + half_size * (1.0 / self.m + 1.0 / self.n + 1.0 / self.k)
        return np.asarray(self.flops / rate * slowdown)


class Split(NamedTuple):
    """How one micro-batch is split over devices; all arrays have the same shape."""

    tensor: Floats
    micro_batch: Floats
    context: Floats
    expert: Floats

    @classmethod
    def of(
        cls,
        *,
        tensor: npt.ArrayLike = 1,
        micro_batch: npt.ArrayLike = 1,
        context: npt.ArrayLike = 1,
        expert: npt.ArrayLike = 1,
    ) -> Split:
        """Build a split from arrays that are broadcast against each other."""
        parts = np.broadcast_arrays(
            *(np.asarray(part, float) for part in (tensor, micro_batch, context, expert))
        )
        return cls(*parts)

    def tokens(self, seq: int) -> Floats:
        """Return the number of tokens of a micro-batch on one device."""
        return self.micro_batch * seq / self.context


def key_value_width(model: Transformer, split: Split) -> Floats:
    """Elements of a token's keys and values on one rank: at least one head, which is replicated on additional ranks."""
    return np.asarray(2.0 * np.maximum(model.kv_heads / split.tensor, 1.0) * model.head_size)


def projections(model: Transformer, split: Split) -> tuple[Matmul, ...]:
    """Linear layers of attention: query, key, value and output projections, and low-rank ones of latent attention."""
    tokens, one = split.tokens(model.seq), np.ones_like(split.tensor)
    hidden, heads = one * model.hidden, model.heads / split.tensor
    if model.latent is None:
        width = model.heads * model.head_size / split.tensor + key_value_width(model, split)
        return (
            Matmul("qkv", tokens, width, hidden, one),
            Matmul("attention out", tokens, hidden, heads * model.head_size, one),
        )
    latent = model.latent
    query = heads * (latent.nope_size + latent.rope_size)
    down = (
        Matmul("query", tokens, query, hidden, one)
        if latent.query_rank == 0
        else Matmul("query down", tokens, one * latent.query_rank, hidden, one)
    )
    up = () if latent.query_rank == 0 else (Matmul("query up", tokens, query, one * latent.query_rank, one),)
    return (
        down,
        *up,
        Matmul("key-value down", tokens, one * (latent.kv_rank + latent.rope_size), hidden, one),
        Matmul(
            "key-value up", tokens, heads * (latent.nope_size + latent.value_size), one * latent.kv_rank, one
        ),
        Matmul("attention out", tokens, hidden, heads * latent.value_size, one),
    )


def attention_core(model: Transformer, split: Split) -> tuple[Matmul, Matmul]:
    """Attention scores and their product with the values, for every head: all seq x seq scores, causal or not."""
    count = split.micro_batch * model.heads / split.tensor
    one = np.ones_like(count)
    own, every = one * model.seq / split.context, one * model.seq
    if model.latent is None:
        score_size = value_size = model.head_size
    else:
        score_size, value_size = model.latent.nope_size + model.latent.rope_size, model.latent.value_size
    return (
        Matmul("scores", own, every, one * score_size, count),
        Matmul("values", own, one * value_size, every, count),
    )


def feed_forward(
    model: Transformer, split: Split, width: int, *, name: str = "feed-forward"
) -> tuple[Matmul, ...]:
    """Up (and gate) and down projections of inner width `width`."""
    tokens, one = split.tokens(model.seq), np.ones_like(split.tensor)
    inner = width / split.tensor
    return (
        Matmul(f"{name} in", tokens, inner * (2 if model.gated else 1), one * model.hidden, one),
        Matmul(f"{name} out", tokens, one * model.hidden, inner, one),
    )


def experts(model: Transformer, split: Split) -> tuple[Matmul, ...]:
    """Products of the router, of routed experts with balanced load, and of shared experts, which process all tokens."""
    mixture = model.mixture
    assert mixture is not None
    tokens, one = split.tokens(model.seq), np.ones_like(split.tensor)
    local = mixture.experts / split.expert
    visits = tokens * mixture.active / local
    inner = mixture.ffn / split.tensor
    routed = (
        Matmul("router", tokens, one * mixture.experts, one * model.hidden, one),
        Matmul("experts in", visits, inner * (2 if model.gated else 1), one * model.hidden, local),
        Matmul("experts out", visits, one * model.hidden, inner, local),
    )
    shared = (
        feed_forward(model, split, mixture.shared_ffn, name="shared expert") if mixture.shared_ffn else ()
    )
    return routed + shared


class LinearWork(NamedTuple):
    """Matrix products of a layer's linear layers, by part of the layer."""

    attention: tuple[Matmul, ...]
    dense: tuple[Matmul, ...]
    """Products of the feed-forward layer, in layers without experts."""
    shared: tuple[Matmul, ...]
    """Products of the router and of the shared experts, which process every token, in layers with experts."""
    routed: tuple[Matmul, ...]
    """Products of the routed experts on this rank."""


def weights(model: Transformer, split: Split) -> LinearWork:
    """The linear layers as products, whose (k x n) matrices are the layer's weights."""
    mixed = experts(model, split) if model.mixture is not None else ()
    return LinearWork(
        attention=projections(model, split),
        dense=feed_forward(model, split, model.ffn),
        shared=(*mixed[:1], *mixed[3:]),
        routed=mixed[1:3],
    )


def head(model: Transformer, split: Split) -> Matmul:
    """The output projection onto the vocabulary, sharded over the tensor-parallel ranks."""
    one = np.ones_like(split.tensor)
    return Matmul("head", split.tokens(model.seq), model.vocab / split.tensor, one * model.hidden, one)


def orthogonalised(weight: Matmul) -> tuple[Matmul, ...]:
    """The matrix products of Muon's update of a layer's weight matrices: five Newton-Schulz steps.

    Each step on an n x M matrix X, n <= M, is A = X Xᵀ, A A, and (b A + c A A) X: 4 n² M + 2 n³ FLOPs (Jordan et al.
    2024, "Muon: an optimizer for hidden layers in neural networks", NewtonSchulz5).
    """
    short, long = np.minimum(weight.k, weight.n), np.maximum(weight.k, weight.n)
    times = NEWTON_SCHULZ_STEPS * weight.times
    return (
        Matmul("X Xᵀ", short, short, long, times),
        Matmul("A A", short, short, short, times),
        Matmul("B X", short, long, short, times),
    )


WHOLE_BYTES = 2 * 4 + 2 * 7
"""Bytes per token and hidden element: two norms (read 2, write 2), two additions (read 2 x 2, write 2, mask 1)."""

SCORE_BYTES = 13
"""Bytes per score: written 2; softmax reads 2, writes 2; dropout reads 2, writes 2 and mask 1; the product reads 2."""

LOGIT_BYTES = 20
"""Bytes per logit in both passes: written and read in 2, cast to 4; maximum, exponential, sum and gradient in 4."""


def block_bytes(model: Transformer, split: Split, *, sequence_parallel: npt.ArrayLike) -> Floats:
    """Bytes that norms, additions and rotary embedding move, without attention scores."""
    tokens = split.tokens(model.seq)
    whole = WHOLE_BYTES * model.hidden / np.where(np.asarray(sequence_parallel), split.tensor, 1.0)
    heads = model.heads * model.head_size / split.tensor + key_value_width(model, split)
    return np.asarray(tokens * (whole + 4.0 * heads))


def activation_bytes(model: Transformer, split: Split, width: float) -> Floats:
    """Bytes that the activation function of a feed-forward layer of inner width `width` reads and writes."""
    return np.asarray(split.tokens(model.seq) * (6.0 if model.gated else 4.0) * width / split.tensor)


def routing_bytes(model: Transformer, split: Split) -> Floats:
    """Bytes moved to sort tokens to experts and back: one read and one write per routed token and direction."""
    assert model.mixture is not None
    return np.asarray(split.tokens(model.seq) * model.mixture.active * 8.0 * model.hidden)


def score_bytes(model: Transformer, split: Split) -> Floats:
    """Bytes that softmax and dropout move if attention is not a single fused kernel."""
    return np.asarray(SCORE_BYTES * split.tokens(model.seq) * model.seq * model.heads / split.tensor)


def logit_bytes(model: Transformer, split: Split) -> Floats:
    """Bytes that the cross-entropy loss moves in the forward and backward passes."""
    return np.asarray(LOGIT_BYTES * split.tokens(model.seq) * model.vocab / split.tensor)
