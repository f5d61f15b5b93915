"""Work in a transformer block: matrix products and their times, and the bytes that the other operations move.

A device reaches its peak only on large matrices. The time of ``count`` products of (m x k) by (k x n) matrices is

    t = count 2mnk / (peak e) * (1 + w (1/m + 1/n + 1/k))

Here e is the fraction of the peak that very large matrices reach, and w the matrix size at which moving the operands
takes as long as multiplying them. Both are constants in `spec.Calibration`. The ratio of bytes to FLOPs of a product is
proportional to 1/m + 1/n + 1/k, so this is the roofline model (Williams et al., CACM 2009) with a smooth corner.

For the other operations, the bytes are those that each operation reads and writes in the forward pass, in the order of
Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), with 2-byte elements and 1-byte dropout masks: two norms (read,
write), two residual additions with dropout (read two, write one, mask), the activation function, and, unless attention
is one fused kernel, softmax and dropout of the attention scores. The backward pass moves twice as many bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]


NEWTON_SCHULZ_STEPS = 5


class Matmul(NamedTuple):
    """`times` products of (m x k) by (k x n) matrices on one device."""

    name: str
    m: Floats
    n: Floats
    k: Floats
    times: Floats

    @property
    def flops(self) -> Floats:
        """Total FLOPs of the products, counting multiplications and additions."""
        return np.asarray(2.0 * self.m * self.n * self.k * self.times)

    def seconds(self, rate: float, half_size: float) -> Floats:
        """Return the time of the products in seconds: FLOPs / `rate` * (1 + `half_size` * (1/m + 1/n + 1/k)).

        Args:
            rate: FLOP/s that very large matrices reach.
            half_size: w in the formula of the module docstring.
        """
        slowdown = 1.0 + half_size * (1.0 / self.m + 1.0 / self.n + 1.0 / self.k)
        return np.asarray(self.flops / rate * slowdown)


class Split(NamedTuple):
    """Division of a micro-batch over devices; all arrays have the same shape, one element per layout.

    Attributes:
        tensor: Tensor-parallel degree.
        micro_batch: Number of sequences in the micro-batch.
        context: Context-parallel degree.
        expert: Expert-parallel degree.
    """

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
        """Build a split from numbers or arrays, which are broadcast against each other."""
        parts = np.broadcast_arrays(
            *(np.asarray(part, float) for part in (tensor, micro_batch, context, expert))
        )
        return cls(*parts)

    def tokens(self, seq: int) -> Floats:
        """Return the number of tokens of the micro-batch on one device, for sequences of `seq` tokens."""
        return self.micro_batch * seq / self.context


def key_value_width(model: Transformer, split: Split) -> Floats:
    """Return the number of elements in one token's keys and values on one rank.

    A rank holds at least one key-value head: if there are more tensor-parallel ranks than heads, heads are replicated.
    """
    return np.asarray(2.0 * np.maximum(model.kv_heads / split.tensor, 1.0) * model.head_size)


def projections(model: Transformer, split: Split) -> tuple[Matmul, ...]:
    """Return the matrix products of attention's linear layers: query, key, value and output projections.

    For multi-head latent attention, the projections to and from low-rank vectors are included.
    """
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


def attended_tokens(model: Transformer) -> float:
    """Return the number of attention scores counted per token, averaged over tokens and layers.

    Scores with all tokens are counted, even if attention is causal. With a window of w tokens, a causal layer computes
    s w - w²/2 of the s²/2 scores of a sequence of s tokens; twice as many are counted, w (2 - w/s) for each token.
    """
    share = model.num_windowed_layers / model.layers
    return (1 - share) * model.seq + share * model.window * (2 - model.window / model.seq)


def attention_core(model: Transformer, split: Split, *, masked: bool = False) -> tuple[Matmul, Matmul]:
    """Return the two matrix products of core attention: the scores, and scores times values, for all heads.

    The number of scores is given by `attended_tokens`. With `masked`, it is seq x seq, also in layers with a
    window: attention that is not one fused kernel computes all scores and masks those outside the window.
    """
    count = split.micro_batch * model.heads / split.tensor
    one = np.ones_like(count)
    own, every = one * model.seq / split.context, one * (model.seq if masked else attended_tokens(model))
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
    """Return the products of a feed-forward layer of inner width `width`: up (and gate) projection, down projection."""
    tokens, one = split.tokens(model.seq), np.ones_like(split.tensor)
    inner = width / split.tensor
    return (
        Matmul(f"{name} in", tokens, inner * (2 if model.gated else 1), one * model.hidden, one),
        Matmul(f"{name} out", tokens, one * model.hidden, inner, one),
    )


def experts(model: Transformer, split: Split) -> tuple[Matmul, ...]:
    """Return the products of a mixture-of-experts layer: router, routed experts, and shared experts if there are any.

    Routed experts are assumed to receive equal numbers of tokens; shared experts process all tokens.
    """
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
    """Matrix products of the linear layers in one transformer block, by part of the block."""

    attention: tuple[Matmul, ...]
    dense: tuple[Matmul, ...]
    """Products of the feed-forward layer, in blocks without experts."""
    shared: tuple[Matmul, ...]
    """Products of the router and of the shared experts, which process every token, in blocks with experts."""
    routed: tuple[Matmul, ...]
    """Products of the routed experts on this rank."""


def weights(model: Transformer, split: Split) -> LinearWork:
    """Return the products of a block's linear layers; their (k x n) matrices are the weights of the block."""
    mixed = experts(model, split) if model.mixture is not None else ()
    return LinearWork(
        attention=projections(model, split),
        dense=feed_forward(model, split, model.ffn),
        shared=(*mixed[:1], *mixed[3:]),
        routed=mixed[1:3],
    )


def head(model: Transformer, split: Split) -> Matmul:
    """Return the matrix product of the output projection onto the vocabulary, which tensor parallelism shards."""
    one = np.ones_like(split.tensor)
    return Matmul("head", split.tokens(model.seq), model.vocab / split.tensor, one * model.hidden, one)


def orthogonalised(weight: Matmul) -> tuple[Matmul, ...]:
    """Return the matrix products that Muon uses to orthogonalise the updates of weight matrices.

    The update takes five Newton-Schulz steps. For an n x M matrix X with n <= M, each step computes A = X Xᵀ, A A, and
    (b A + c A A) X, which takes 4 n² M + 2 n³ FLOPs (Jordan et al. 2024, "Muon: an optimizer for hidden layers in
    neural networks", NewtonSchulz5).
    """
    short, long = np.minimum(weight.k, weight.n), np.maximum(weight.k, weight.n)
    times = NEWTON_SCHULZ_STEPS * weight.times
    return (
        Matmul("X Xᵀ", short, short, long, times),
        Matmul("A A", short, short, short, times),
        Matmul("B X", short, long, short, times),
    )


NORM_BYTES = 4
"""Bytes moved per token and element of a norm: read 2, write 2."""
RESIDUAL_BYTES = 2 * 7
"""Bytes moved per token and hidden element for two additions: read 4, write 2, mask 1."""

SCORE_BYTES = 13
"""Bytes moved per attention score.

The product of queries and keys writes 2; softmax reads 2 and writes 2; dropout reads 2, writes 2 and a mask
of 1; the product with the values reads 2.
"""

SEPARATE_BYTES = {2: 33, 4: 17}
"""Additional bytes moved per attention score and pass if softmax is not one fused kernel, by bytes of an element.

In 16 bits, the scores are cast to float32 (6 bytes), scaled (8), masked (9), normalized (8) and cast back (6), instead
of 4 bytes in all; in float32, they are scaled (8), masked (9) and normalized (8), instead of 8 bytes in all. The
backward pass moves about as many bytes.
"""
SEPARATE_KERNELS = 4.0
"""Additional kernels launched per pass if softmax is not one fused kernel: five operations instead of one."""

FUSED_SOFTMAX_TOKENS = 4096
"""Maximum sequence length, in tokens, that Megatron's fused kernel for scale, mask and softmax supports."""

LOGIT_BYTES = 20
"""Bytes moved per logit in both passes.

The logits are written and read with 2 bytes each, then cast to 4 bytes to compute the maximum, the exponential, the sum
and the gradient.
"""


def block_bytes(model: Transformer, split: Split, *, sequence_parallel: npt.ArrayLike) -> Floats:
    """Return the bytes that norms, residual additions and the rotary embedding move in one block's forward pass.

    Attention scores are not included.
    """
    tokens = split.tokens(model.seq)
    each = model.norms_per_layer * NORM_BYTES + RESIDUAL_BYTES
    whole = each * model.hidden / np.where(np.asarray(sequence_parallel), split.tensor, 1.0)
    queries, keys = model.heads * model.head_size / split.tensor, key_value_width(model, split)
    normalised = NORM_BYTES * (queries + keys / 2) if model.qk_norm else 0.0
    return np.asarray(tokens * (whole + 4.0 * (queries + keys) + normalised))


def activation_bytes(model: Transformer, split: Split, width: float) -> Floats:
    """Return the bytes that the activation function of a feed-forward layer of inner width `width` moves."""
    return np.asarray(split.tokens(model.seq) * (6.0 if model.gated else 4.0) * width / split.tensor)


def routing_bytes(model: Transformer, split: Split) -> Floats:
    """Return the bytes moved to sort tokens by expert and back: per routed token, one read and one write each way."""
    assert model.mixture is not None
    return np.asarray(split.tokens(model.seq) * model.mixture.active * 8.0 * model.hidden)


def score_bytes(model: Transformer, split: Split) -> Floats:
    """Return the bytes moved for attention scores, softmax and dropout if attention is not one fused kernel."""
    return np.asarray(SCORE_BYTES * split.tokens(model.seq) * model.seq * model.heads / split.tensor)


def fits_fused_softmax(model: Transformer, split: Split, value_bytes: int) -> npt.NDArray[np.bool_]:
    """Return whether Megatron's fused kernel for scale, mask and softmax supports the scores of unfused attention.

    The kernel needs 16-bit scores, and sequences of at most 4,096 tokens (2,048 in early releases). The sequence
    length, and the number of heads x sequences on each device, must be multiples of four (NVIDIA/Megatron-LM
    megatron/core/fusions/fused_softmax.py@00caa53, `is_kernel_available`; megatron/model/fused_softmax.py@0cb36de).
    Megatron-LM of 2019 has no such kernel.
    """
    fits = value_bytes == 2 and 16 < model.seq <= FUSED_SOFTMAX_TOKENS and model.seq % 4 == 0
    return np.asarray((split.micro_batch * model.heads / split.tensor % 4 == 0) & fits)


def separate_softmax_bytes(model: Transformer, split: Split, value_bytes: int) -> Floats:
    """Return the additional bytes moved in each pass if softmax is not one fused kernel."""
    scores = split.tokens(model.seq) * model.seq * model.heads / split.tensor
    return np.asarray(SEPARATE_BYTES[value_bytes] * scores)


def logit_bytes(model: Transformer, split: Split) -> Floats:
    """Return the bytes that the cross-entropy loss moves in the forward and backward passes."""
    return np.asarray(LOGIT_BYTES * split.tokens(model.seq) * model.vocab / split.tensor)
