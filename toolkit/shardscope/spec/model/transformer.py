"""Transformers described by their sizes: dense, grouped-query, gated, mixture of experts, latent attention."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import PositiveFloat, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.divisors import divisors_text
from shardscope.spec.mixture import Mixture
from shardscope.spec.model.base import Model
from shardscope.spec.numbers import Count, CountOrZero


class LatentAttention(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank projections of queries, keys and values."""

    query_rank: CountOrZero
    """Width of the compressed query; 0 projects queries directly."""
    kv_rank: Count
    """Width of the compressed key and value."""
    rope_size: Count
    """Width of the part of a head's query and key with rotary positions."""
    nope_size: Count
    """Width of the part of a head's query and key without rotary positions."""
    value_size: Count
    """Width of a head's value."""


class Transformer(Model):
    """A decoder (or BERT-like encoder) of identical layers. `kv_heads`, `head_size`, `ffn` have computed defaults."""

    kind: Literal["transformer"] = "transformer"
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count = 0
    """Number of key-value heads (grouped-query attention); `heads` if None or not given."""
    head_size: Count = 0
    """Width of one head; hidden / heads if None or not given."""
    ffn: Count = 0
    """Inner width of the feed-forward layer; 4 x hidden if None or not given."""
    vocab: Count
    seq: Count
    """Number of tokens in one sequence."""
    gated: bool = False
    """Whether the feed-forward layer has three matrices (SwiGLU) instead of two."""
    tied: bool = True
    """Whether the output projection shares the embedding matrix."""
    positions: Literal["learned", "rotary", "alibi", "none"] = "learned"
    num_positions: CountOrZero = 0
    """Rows of the learned position embedding; `seq` if 0 or not given."""
    rotary_base: PositiveFloat | None = None
    """Base of the frequencies of rotary positions, ``rope_theta`` in Hugging Face's configs; None if it is not known.
    It has no effect on predictions."""
    norm: Literal["layernorm", "rmsnorm", "unweighted"] = "layernorm"
    """Kind of norm; ``unweighted`` is a LayerNorm without weights and biases (OLMo)."""
    norms_per_layer: Literal[1, 2, 4] = 2
    """Number of norms in a layer, without `qk_norm`: one if attention and feed-forward layer run in parallel on the
    same normalised input (GPT-J, Phi-2), four if their outputs are normalised, too (Gemma 2)."""
    bias: bool = True
    """Whether the linear layers inside the blocks have biases."""
    qkv_bias: bool | None = None
    """Whether the projections to queries, keys and values have biases (Qwen2); None follows `bias`."""
    out_bias: bool | None = None
    """Whether attention's output projection has a bias; None follows `bias`."""
    norm_bias: bool = True
    """Whether layer norms have biases; RMSNorm has none."""
    qk_norm: bool | Literal["width"] = False
    """Whether queries and keys are normalised: True for each head, with weights that all heads share (Qwen3), or
    ``width`` if every head has weights of its own (OLMo 2)."""
    attention_sinks: bool = False
    """Whether each head has a learned score that takes part in the softmax (gpt-oss)."""
    window: CountOrZero = 0
    """Number of tokens that a token attends to in layers with sliding-window attention; 0 for no such layers."""
    full_attention_every: CountOrZero = 0
    """If there is a window: every n-th layer attends to all tokens (2 in Gemma 2, 6 in Gemma 3); 0 for no layer."""
    final_norm: bool = True
    """Whether there is a norm before the output head; encoders such as BERT have none."""
    embedding_norm: bool = False
    """Whether there is a norm after the embeddings (BERT)."""
    token_types: CountOrZero = 0
    """Rows of BERT's segment embedding."""
    pooler: bool = False
    """Whether a dense layer is applied to the first token's output (BERT's pooler)."""
    head_bias: bool = False
    """Whether the output projection has a bias (BERT's masked-language head)."""
    lm_head: bool = True
    """Whether there is an output projection to the vocabulary at all."""
    head_transform: bool = False
    """Whether there are a dense layer and a norm before the output projection (BERT's masked-language head)."""
    mixture: Mixture | None = None
    latent: LatentAttention | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_none(cls, fields: Any) -> Any:
        """Drop fields that are None, so that they get their defaults, unless None is a valid value."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None or name in _MAY_BE_NONE}

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        """Fill in sizes that follow from other sizes, after these are validated, so that all are plain integers."""
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
                self.__dict__[name] = size  # assigned past pydantic, which has frozen the model
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise SpecError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"use one of {divisors_text(self.heads, near=self.kv_heads)}"
            )
        if self.full_attention_every == 1 and self.window:
            raise SpecError(
                f"full_attention_every=1 leaves no layer with window={self.window}; use window=0, or 2 or more"
            )
        if self.mixture is not None and self.mixture.dense_layers > self.layers:
            raise SpecError(
                f"mixture.dense_layers={self.mixture.dense_layers} is more than layers={self.layers}; "
                f"use 0 to {self.layers}"
            )
        return self

    # Exact counts of trainable parameters. A norm has a weight, and a LayerNorm with `norm_bias` also a bias.

    def _norm(self, width: int) -> int:
        if self.norm == "unweighted":
            return 0
        return width * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    @property
    def _norms(self) -> int:
        return self.norms_per_layer * self._norm(self.hidden)

    @property
    def attention_params(self) -> int:
        """Number of attention parameters in one layer, without the norm."""
        if self.latent is not None:
            return _latent_params(self, self.latent)
        queries, keys = self.heads * self.head_size, 2 * self.kv_heads * self.head_size
        biased_in = self.bias if self.qkv_bias is None else self.qkv_bias
        biased_out = self.bias if self.out_bias is None else self.out_bias
        inward = (self.hidden + biased_in) * (queries + keys)
        outward = (queries + biased_out) * self.hidden
        return inward + outward + self._qk_norm_params + (self.heads if self.attention_sinks else 0)

    @property
    def _qk_norm_params(self) -> int:
        if not self.qk_norm:
            return 0
        heads = self.heads + self.kv_heads if self.qk_norm == "width" else 2
        return heads * self._norm(self.head_size)

    def _mlp_params(self, width: int) -> int:
        matrices = 3 if self.gated else 2
        biases = ((matrices - 1) * width + self.hidden) if self.bias else 0
        return matrices * self.hidden * width + biases

    @property
    def ffn_params(self) -> int:
        """Number of parameters in the dense feed-forward part of one layer, without the norm."""
        return self._mlp_params(self.ffn)

    @property
    def layer_params(self) -> int:
        """Number of parameters in one layer with a dense feed-forward part: attention, feed-forward and norms."""
        return self.attention_params + self.ffn_params + self._norms

    @property
    def expert_params(self) -> int:
        """Number of parameters in all routed experts of one mixture-of-experts layer; 0 for a dense model."""
        return 0 if self.mixture is None else self.mixture.experts * self._mlp_params(self.mixture.ffn)

    @property
    def router_params(self) -> int:
        """Number of parameters in the router and the shared experts' gate of one mixture-of-experts layer."""
        if self.mixture is None:
            return 0
        scores = self.hidden * (self.mixture.experts + self.mixture.shared_gate)
        return scores + (self.mixture.experts if self.mixture.router_bias else 0)

    @property
    def shared_expert_params(self) -> int:
        """Number of parameters in the shared experts of one mixture-of-experts layer; these process every token."""
        width = 0 if self.mixture is None else self.mixture.shared_ffn
        return self._mlp_params(width) if width else 0

    @property
    def mixture_layer_params(self) -> int:
        """Number of parameters in one mixture-of-experts layer, including attention and norms."""
        ffn = self.expert_params + self.shared_expert_params + self.router_params
        return self.attention_params + ffn + self._norms

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a dense feed-forward part."""
        return self.layers if self.mixture is None else self.mixture.dense_layers

    @property
    def num_windowed_layers(self) -> int:
        """Number of layers with sliding-window attention, whose window is shorter than the sequence."""
        if not 0 < self.window < self.seq:
            return 0
        return self.layers - (self.layers // self.full_attention_every if self.full_attention_every else 0)

    @property
    def num_mixture_layers(self) -> int:
        """Number of mixture-of-experts layers."""
        return self.layers - self.num_dense_layers

    @property
    def embedding_params(self) -> int:
        """Number of parameters before the first layer: token, position and segment embeddings and their norm."""
        rows = self.vocab + self.token_types
        if self.positions == "learned":
            rows += self.num_positions or self.seq
        return rows * self.hidden + (self._norm(self.hidden) if self.embedding_norm else 0)

    @property
    def final_norm_params(self) -> int:
        """Number of parameters in the norm before the head."""
        return self._norm(self.hidden) if self.final_norm else 0

    @property
    def head_params(self) -> int:
        """Number of parameters after the last layer and its norm; a tied output projection counts as embedding."""
        params = (self.hidden + 1) * self.hidden if self.pooler else 0
        if not self.lm_head:
            return params
        if self.head_transform:
            params += (self.hidden + 1) * self.hidden + self._norm(self.hidden)
        return params + (0 if self.tied else self.vocab * self.hidden) + (self.vocab if self.head_bias else 0)

    @property
    def num_params(self) -> int:
        """Total number of parameters in the model."""
        blocks = (
            self.num_dense_layers * self.layer_params + self.num_mixture_layers * self.mixture_layer_params
        )
        return self.embedding_params + blocks + self.final_norm_params + self.head_params

    @property
    def num_active_params(self) -> int:
        """Number of parameters that process one token: all but those of the routed experts that are not selected."""
        if self.mixture is None:
            return self.num_params
        idle = (self.mixture.experts - self.mixture.active) * self._mlp_params(self.mixture.ffn)
        return self.num_params - self.num_mixture_layers * idle


_MAY_BE_NONE = {"mixture", "latent", "qkv_bias", "out_bias", "rotary_base"}


def _latent_params(model: Transformer, latent: LatentAttention) -> int:
    """Return the number of attention parameters in a layer of DeepSeek-V2 (section 2.1), with the latents' norms."""
    head = latent.nope_size + latent.rope_size
    if latent.query_rank:
        queries = model.hidden * latent.query_rank + latent.query_rank * (1 + model.heads * head)
    else:
        queries = model.hidden * model.heads * head
    down = model.hidden * (latent.kv_rank + latent.rope_size) + latent.kv_rank
    up = latent.kv_rank * model.heads * (latent.nope_size + latent.value_size)
    return queries + down + up + model.heads * latent.value_size * model.hidden
