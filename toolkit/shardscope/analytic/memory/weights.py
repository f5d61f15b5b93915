"""Shapes and element counts of a model's weights, as tensor parallelism and ZeRO divide them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]
Matrix = tuple[int, int]
"""Shape of a linear layer's weight matrix: (number of inputs, number of outputs)."""


class WeightShapes(NamedTuple):
    """Matrix shapes and element counts of a model's weights, per transformer layer unless stated otherwise."""

    attention: tuple[Matrix, ...]
    """Matrices of attention that tensor parallelism shards."""
    dense: tuple[Matrix, ...]
    """Matrices of the feed-forward part, in layers without experts."""
    shared: tuple[Matrix, ...]
    """Matrices of the shared experts, which process every token."""
    expert: tuple[Matrix, ...]
    """Matrices of one routed expert."""
    expert_params: int
    """Elements of all routed experts in a layer."""
    key_params: int
    """Elements of `attention` that compute keys and values; 0 with latent attention, whose heads are all sharded."""
    key_heads: int
    """Number of key-value heads; additional tensor-parallel ranks hold copies, as in Megatron-Core."""
    whole: int
    """Elements that are replicated on every tensor-parallel rank: norms, biases, low-rank projections."""
    whole_mixed: int
    """Elements that are replicated on every tensor-parallel rank in a layer with experts, including its router."""
    table: int
    """Elements of the word embedding of the whole model."""
    head: int
    """Elements of the output projection of the whole model; if it is tied to the embedding, the same as `table`."""
    before: int
    """Elements before the first layer that every tensor-parallel rank holds: the position embedding."""
    behind: int
    """Elements after the last layer that every tensor-parallel rank holds: the final norm."""
    tied: bool
    """Whether the output projection uses the weights of the word embedding."""

    @property
    def largest(self) -> int:
        """Number of elements of the largest matrix of a layer, without routed experts."""
        return max(rows * columns for rows, columns in (*self.attention, *self.dense, *self.shared))

    @property
    def attention_params(self) -> int:
        """Number of elements in `attention`, which tensor parallelism shards."""
        return _size(self.attention)

    @property
    def dense_params(self) -> int:
        """Number of elements in `dense`, which tensor parallelism shards."""
        return _size(self.dense)

    @property
    def shared_params(self) -> int:
        """Number of elements in `shared`, which tensor parallelism shards."""
        return _size(self.shared)

    def repeated_keys(self, tensor: Floats) -> Floats:
        """Return the elements per layer that a rank holds because key-value heads are replicated.

        Heads are replicated if the tensor-parallel degree exceeds their number. The result is the excess over 1/t of
        the elements, for degree t.
        """
        return self.key_params * (1 / np.minimum(tensor, self.key_heads) - 1 / tensor)

    def factors(self, *, mixed: bool, experts: int) -> int:
        """Return the total number of rows and columns in one layer's matrices.

        These are the matrices of its `experts` routed experts if `mixed`, else all other matrices.
        """
        if mixed:
            return experts * sum(map(sum, self.expert))
        return sum(map(sum, (*self.attention, *(self.shared or self.dense))))


def _size(matrices: tuple[Matrix, ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)


@lru_cache(maxsize=256)
def weights(model: Transformer) -> WeightShapes:
    """Return the shapes and element counts of a model's weights."""
    mixture, attention = model.mixture, _attention(model)
    dense = _feed_forward(model, model.ffn)
    shared = _feed_forward(model, mixture.shared_ffn) if mixture and mixture.shared_ffn else ()
    mixed = _size(attention) + _size(shared) + model.expert_params
    table = model.vocab * model.hidden
    own_head = 0 if model.tied or not model.lm_head else table
    return WeightShapes(
        attention=attention,
        dense=dense,
        shared=shared,
        expert=_feed_forward(model, mixture.ffn) if mixture else (),
        expert_params=model.expert_params,
        key_params=0 if model.latent else 2 * model.kv_heads * model.head_size * model.hidden,
        key_heads=model.kv_heads,
        whole=model.layer_params - _size(attention) - _size(dense),
        whole_mixed=model.mixture_layer_params - mixed if mixture else 0,
        table=table,
        head=table if model.lm_head else 0,
        before=model.embedding_params - table,
        behind=model.final_norm_params + model.head_params - own_head,
        tied=model.tied,
    )


def _feed_forward(model: Transformer, inner: int) -> tuple[Matrix, ...]:
    """Return the two matrices of a feed-forward layer: the up projection and the down projection.

    A gate is part of the up projection's matrix, as in Megatron and vLLM.
    """
    return (model.hidden, (1 + model.gated) * inner), (inner, model.hidden)


def _attention(model: Transformer) -> tuple[Matrix, ...]:
    """Return the matrices of attention that tensor parallelism shards: all or, with latent attention, only some.

    For latent attention, these are the up-projections from low-rank vectors and the output projection.
    """
    latent, hidden, heads = model.latent, model.hidden, model.heads
    if latent is None:
        width = heads * model.head_size
        return (hidden, width + 2 * model.kv_heads * model.head_size), (width, hidden)
    query = latent.nope_size + latent.rope_size
    up = (latent.kv_rank, heads * (latent.nope_size + latent.value_size))
    return (latent.query_rank or hidden, heads * query), up, (heads * latent.value_size, hidden)
