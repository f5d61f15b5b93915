"""Where the parameters of a transformer sit: what tensor parallelism divides, what it repeats, what experts hold.

`spec.Transformer` counts; here the counts are laid out as matrices. Linear layers are divided by the tensor degree;
norms, biases, routers and the narrow projections of latent attention are whole on every rank (as in Megatron-Core).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]
Matrix = tuple[int, int]
"""Inputs and outputs of a linear layer."""


class Weights(NamedTuple):
    """Elements; of one layer unless it says otherwise."""

    attention: tuple[Matrix, ...]
    """Linear layers that tensor parallelism divides."""
    dense: tuple[Matrix, ...]
    """Of the feed-forward layer, in layers without a mixture."""
    shared: tuple[Matrix, ...]
    """Of the experts that every token visits."""
    expert: tuple[Matrix, ...]
    """Of one routed expert."""
    expert_params: int
    """Of all routed experts."""
    key_params: int
    """Of `attention`, those that make keys and values; 0 with latent attention, whose heads are all divided."""
    key_heads: int
    """Heads of keys and values: tensor ranks beyond repeat them, as Megatron-Core does."""
    whole: int
    """On every rank: norms, biases, narrow projections."""
    whole_mixed: int
    """The same in a layer with experts, its router included."""
    table: int
    """Of the words, in the whole model."""
    head: int
    """Of the output projection, in the whole model; where it is tied, the table's."""
    before: int
    """In the whole model, before the first layer, on every tensor rank: positions."""
    behind: int
    """In the whole model, behind the last layer, on every tensor rank: the final norm."""
    tied: bool

    @property
    def attention_params(self) -> int:
        """Divided by the tensor degree."""
        return _size(self.attention)

    @property
    def dense_params(self) -> int:
        """Divided by the tensor degree."""
        return _size(self.dense)

    @property
    def shared_params(self) -> int:
        """Divided by the tensor degree."""
        return _size(self.shared)

    def repeated_keys(self, tensor: Floats) -> Floats:
        """Elements of a layer that a rank holds besides its t-th part, as there are more ranks than heads of keys."""
        return self.key_params * (1 / np.minimum(tensor, self.key_heads) - 1 / tensor)

    def factors(self, *, mixed: bool, experts: int) -> int:
        """Rows and columns of one layer's matrices: of its experts, or of all others."""
        if mixed:
            return experts * sum(map(sum, self.expert))
        return sum(map(sum, (*self.attention, *(self.shared or self.dense))))


def _size(matrices: tuple[Matrix, ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)


@lru_cache(maxsize=256)
def weights(model: Transformer) -> Weights:
    """The table of a model."""
    mixture, attention = model.mixture, _attention(model)
    dense = _feed_forward(model, model.ffn)
    shared = _feed_forward(model, mixture.shared_ffn) if mixture and mixture.shared_ffn else ()
    mixed = _size(attention) + _size(shared) + model.expert_params
    table = model.vocab * model.hidden
    own_head = 0 if model.tied or not model.lm_head else table
    return Weights(
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
    """Gate and input as one matrix, as Megatron and vLLM keep them, and the way back."""
    return (model.hidden, (1 + model.gated) * inner), (inner, model.hidden)


def _attention(model: Transformer) -> tuple[Matrix, ...]:
    """The matrices that are divided: all of them, or with latent attention those that widen."""
    latent, hidden, heads = model.latent, model.hidden, model.heads
    if latent is None:
        width = heads * model.head_size
        return (hidden, width + 2 * model.kv_heads * model.head_size), (width, hidden)
    query = latent.nope_size + latent.rope_size
    up = (latent.kv_rank, heads * (latent.nope_size + latent.value_size))
    return (latent.query_rank or hidden, heads * query), up, (heads * latent.value_size, hidden)
