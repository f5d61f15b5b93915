"""Transformers by their sizes: dense, grouped-query, gated, mixtures of experts, latent attention."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.divisors import divisors_text
from shardscope.spec.model.base import Model
from shardscope.spec.numbers import Count, CountOrZero


class Mixture(Spec):
    """A mixture of experts in place of the feed-forward layer."""

    experts: Count
    """Routed experts in a layer."""
    active: Count
    """Routed experts that each token visits (top-k)."""
    ffn: Count
    """Inner width of one routed expert."""
    shared_ffn: CountOrZero = 0
    """Inner width of the experts that every token visits, taken together; 0 for none."""
    dense_layers: CountOrZero = 0
    """Layers, counted from the first, that keep the dense feed-forward layer."""
    router_bias: bool = False
    """A bias per expert that is added to its score (DeepSeek-V3). It is set by a rule and not trained, but published
    parameter counts include it."""
    shared_gate: bool = False
    """A gate in front of the shared experts (Qwen2-MoE)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.active > self.experts:
            raise SpecError(
                f"mixture.active={self.active} is more than mixture.experts={self.experts}; "
                f"use 1 to {self.experts}"
            )
        return self


class LatentAttention(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries and keys through narrow projections."""

    query_rank: CountOrZero
    """Width of the compressed query; 0 projects queries directly."""
    kv_rank: Count
    """Width of the compressed key and value."""
    rope_size: Count
    """Part of a head's query and key that carries the rotary position."""
    nope_size: Count
    """Part of a head's query and key that does not."""
    value_size: Count
    """Width of a head's value."""


class Transformer(Model):
    """A decoder (or BERT-like encoder) of equal layers. `kv_heads`, `head_size` and `ffn` have computed defaults."""

    kind: Literal["transformer"] = "transformer"
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count = 0
    """Heads of keys and values (grouped-query attention); None, or left out, for `heads`."""
    head_size: Count = 0
    """Width of one head; None, or left out, for hidden / heads."""
    ffn: Count = 0
    """Inner width of the feed-forward layer; None, or left out, for 4 x hidden."""
    vocab: Count
    seq: Count
    """Tokens of one sequence."""
    gated: bool = False
    """Three matrices in the feed-forward layer (SwiGLU) instead of two."""
    tied: bool = True
    """The output projection is the embedding matrix."""
    positions: Literal["learned", "rotary", "alibi", "none"] = "learned"
    num_positions: CountOrZero = 0
    """Rows of the learned position embedding; 0, or left out, for `seq`."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    """Whether the linear layers inside the blocks have biases."""
    qkv_bias: bool | None = None
    """Whether the projections to queries, keys and values have biases (Qwen2); None follows `bias`."""
    out_bias: bool | None = None
    """Whether attention's output projection has a bias; None follows `bias`."""
    norm_bias: bool = True
    """Whether layer norms have biases; RMSNorm has none."""
    qk_norm: bool = False
    """A norm over each head of queries and of keys (Qwen3)."""
    final_norm: bool = True
    """A norm before the head; encoders such as BERT have none."""
    embedding_norm: bool = False
    """A norm after the embeddings (BERT)."""
    token_types: CountOrZero = 0
    """Rows of BERT's segment embedding."""
    pooler: bool = False
    """BERT's dense layer over the first token."""
    head_bias: bool = False
    """Whether the output projection has a bias (BERT's masked-language head)."""
    lm_head: bool = True
    """Whether there is an output projection to the vocabulary at all."""
    head_transform: bool = False
    """A dense layer and a norm before the output projection (BERT's masked-language head)."""
    mixture: Mixture | None = None
    latent: LatentAttention | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, fields: Any) -> Any:
        """Drop fields that are None, unless None is a valid value of the field."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None or name in _MAY_BE_NONE}

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        """Fill in sizes that follow from others, after the validation of these, so that they are plain integers."""
        if not self.head_size and self.latent is None and self.hidden % self.heads:
            raise SpecError(
                f"heads={self.heads} does not divide hidden={self.hidden}; give head_size=... or other heads"
            )
        follows = {
            "kv_heads": self.heads,
            "head_size": max(1, self.hidden // self.heads),
            "ffn": 4 * self.hidden,
        }
        for name, size in follows.items():
            if not getattr(self, name):
                self.__dict__[name] = size  # the model is frozen from here on
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise SpecError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"use one of {divisors_text(self.heads, near=self.kv_heads)}"
            )
        if self.mixture is not None and self.mixture.dense_layers > self.layers:
            raise SpecError(
                f"mixture.dense_layers={self.mixture.dense_layers} is more than layers={self.layers}; "
                f"use 0 to {self.layers}"
            )
        return self

    # Exact numbers of trainable parameters. A norm has a weight, and also a bias if it is a LayerNorm with `norm_bias`.

    def _norm(self, width: int) -> int:
        return width * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    @property
    def attention_params(self) -> int:
        """Parameters of the attention of one layer, without its norm."""
        if self.latent is not None:
            return _latent_params(self, self.latent)
        queries, keys = self.heads * self.head_size, 2 * self.kv_heads * self.head_size
        biased_in = self.bias if self.qkv_bias is None else self.qkv_bias
        biased_out = self.bias if self.out_bias is None else self.out_bias
        inward = (self.hidden + biased_in) * (queries + keys)
        outward = (queries + biased_out) * self.hidden
        return inward + outward + (2 * self._norm(self.head_size) if self.qk_norm else 0)

    def _mlp_params(self, width: int) -> int:
        matrices = 3 if self.gated else 2
        biases = ((matrices - 1) * width + self.hidden) if self.bias else 0
        return matrices * self.hidden * width + biases

    @property
    def ffn_params(self) -> int:
        """Parameters of the dense feed-forward part of one layer, without its norm."""
        return self._mlp_params(self.ffn)

    @property
    def layer_params(self) -> int:
        """Parameters of one layer with a dense feed-forward part: attention, feed-forward and two norms."""
        return self.attention_params + self.ffn_params + 2 * self._norm(self.hidden)

    @property
    def expert_params(self) -> int:
        """Parameters of all routed experts of one mixture layer; 0 without a mixture."""
        return 0 if self.mixture is None else self.mixture.experts * self._mlp_params(self.mixture.ffn)

    @property
    def router_params(self) -> int:
        """Parameters of the router and the shared experts' gate of one mixture layer."""
        if self.mixture is None:
            return 0
        scores = self.hidden * (self.mixture.experts + self.mixture.shared_gate)
        return scores + (self.mixture.experts if self.mixture.router_bias else 0)

    @property
    def shared_expert_params(self) -> int:
        """Parameters of the shared experts of one mixture layer, which every token visits."""
        width = 0 if self.mixture is None else self.mixture.shared_ffn
        return self._mlp_params(width) if width else 0

    @property
    def mixture_layer_params(self) -> int:
        """Parameters of one layer with a mixture of experts."""
        ffn = self.expert_params + self.shared_expert_params + self.router_params
        return self.attention_params + ffn + 2 * self._norm(self.hidden)

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a dense feed-forward part."""
        return self.layers if self.mixture is None else self.mixture.dense_layers

    @property
    def num_mixture_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return self.layers - self.num_dense_layers

    @property
    def embedding_params(self) -> int:
        """Parameters before the first layer: token, position and segment embeddings and their norm."""
        rows = self.vocab + self.token_types
        if self.positions == "learned":
            rows += self.num_positions or self.seq
        return rows * self.hidden + (self._norm(self.hidden) if self.embedding_norm else 0)

    @property
    def final_norm_params(self) -> int:
        """Parameters of the norm before the head."""
        return self._norm(self.hidden) if self.final_norm else 0

    @property
    def head_params(self) -> int:
        """Parameters after the last layer and its norm; a tied output projection counts as embedding."""
        params = (self.hidden + 1) * self.hidden if self.pooler else 0
        if not self.lm_head:
            return params
        if self.head_transform:
            params += (self.hidden + 1) * self.hidden + self._norm(self.hidden)
        return params + (0 if self.tied else self.vocab * self.hidden) + (self.vocab if self.head_bias else 0)

    @property
    def num_params(self) -> int:
        """Total number of parameters of the model."""
        blocks = (
            self.num_dense_layers * self.layer_params + self.num_mixture_layers * self.mixture_layer_params
        )
        return self.embedding_params + blocks + self.final_norm_params + self.head_params

    @property
    def num_active_params(self) -> int:
        """Parameters that one token uses: routed experts that it does not visit are left out."""
        if self.mixture is None:
            return self.num_params
        idle = (self.mixture.experts - self.mixture.active) * self._mlp_params(self.mixture.ffn)
        return self.num_params - self.num_mixture_layers * idle


_MAY_BE_NONE = {"mixture", "latent", "qkv_bias", "out_bias"}


def _latent_params(model: Transformer, latent: LatentAttention) -> int:
    """Attention parameters of DeepSeek-V2 (section 2.1): down- and up-projections, and a norm per compressed vector."""
    head = latent.nope_size + latent.rope_size
    if latent.query_rank:
        queries = model.hidden * latent.query_rank + latent.query_rank * (1 + model.heads * head)
    else:
        queries = model.hidden * model.heads * head
    down = model.hidden * (latent.kv_rank + latent.rope_size) + latent.kv_rank
    up = latent.kv_rank * model.heads * (latent.nope_size + latent.value_size)
    return queries + down + up + model.heads * latent.value_size * model.hidden
