"""Transformers by their sizes: dense, grouped-query, gated, mixtures of experts, latent attention."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from shardscope.spec._base import Spec
from shardscope.spec.model.base import Model


class Mixture(Spec):
    """A mixture of experts in place of the feed-forward layer."""

    experts: PositiveInt
    """Routed experts in a layer."""
    active: PositiveInt
    """Routed experts that each token visits (top-k)."""
    ffn: PositiveInt
    """Inner width of one routed expert."""
    shared_ffn: NonNegativeInt = 0
    """Inner width of the experts that every token visits, taken together; 0 for none."""
    dense_layers: NonNegativeInt = 0
    """Layers, counted from the first, that keep the dense feed-forward layer."""
    router_bias: bool = False


class LatentAttention(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries and keys through narrow projections."""

    query_rank: NonNegativeInt
    """Width of the compressed query; 0 projects queries directly."""
    kv_rank: PositiveInt
    """Width of the compressed key and value."""
    rope_size: PositiveInt
    """Part of a head's query and key that carries the rotary position."""
    nope_size: PositiveInt
    """Part of a head's query and key that does not."""
    value_size: PositiveInt
    """Of a head's value."""


class Transformer(Model):
    """A decoder (or BERT-like encoder) of equal layers."""

    kind: Literal["transformer"] = "transformer"
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt | None = None
    """Heads of keys and values (grouped-query attention); None for as many as `heads`."""
    head_size: PositiveInt | None = None
    """None for hidden / heads."""
    ffn: PositiveInt | None = None
    """Inner width of the feed-forward layer; None for 4 x hidden."""
    vocab: PositiveInt
    seq: PositiveInt
    """Tokens of one sequence."""
    gated: bool = False
    """Three matrices in the feed-forward layer (SwiGLU) instead of two."""
    tied: bool = True
    """The output projection is the embedding matrix."""
    positions: Literal["learned", "rotary", "alibi", "none"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    """Of the linear layers inside the blocks."""
    mixture: Mixture | None = None
    latent: LatentAttention | None = None
