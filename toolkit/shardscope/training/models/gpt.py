"""GPT-2 without dropout: pre-LayerNorm blocks, learned position embeddings, input and output embeddings tied."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardscope.errors import DataError
from shardscope.spec.models import GPTConfig
from shardscope.training.models._blocks import CheapToRecompute, ForwardPart

_INIT_STD = 0.02


class GPT(nn.Module):
    """GPT-2 from tokens `(N, T)` to next-token logits `(N, T, vocab)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)
        self.blocks = nn.ModuleList(self.make_block(config, number) for number in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self._init_parameters()

    def make_block(self, config: GPTConfig, number: int) -> nn.Module:  # noqa: ARG002
        """Return a new block, which is layer `number` of the model."""
        return TransformerBlock(config)

    def forward(self, tokens: Tensor) -> Any:
        """Return the next-token logits `(N, T, vocab)` for tokens `(N, T)`.

        Raises:
            DataError: The sequences have more tokens than the model has position embeddings.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.score(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the sum of token and position embeddings `(N, T, hidden)` for tokens `(N, T)`."""
        length = tokens.shape[1]
        if length > self.config.seq:
            raise DataError(
                f"seq={length} is longer than the model's {self.config.seq} positions; use a smaller seq, or a "
                "model with more positions"
            )
        stream: Tensor = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return stream

    def score(self, x: Tensor) -> Tensor:
        """Return the next-token logits `(N, T, vocab)` for the output `(N, T, hidden)` of the last block."""
        scores: Tensor = functional.linear(self.norm(x), self.tokens.weight)
        return scores

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Return the embedding, the blocks and the head as named layers, in order, for a pipeline.

        The embedding and the head share the weight of the token embedding.
        """
        embedding = ForwardPart(self.embed, self.tokens, self.positions)
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("embedding", embedding), *blocks, ("head", ForwardPart(self.score, self.norm, self.tokens))]

    def tensor_plan(self) -> dict[str, str]:
        """Return how tensor parallelism divides each layer, by name: whole heads, and columns and rows of the FFN.

        With sequence parallelism, the blocks and the last norm work on parts of sequences.
        """
        return {
            "blocks.*.attention.qkv": "columns:3",
            "blocks.*.attention.core.project": "rows",
            "blocks.*.ffn.widen": "columns",
            "blocks.*.ffn.narrow.project": "rows",
            "blocks.*": "sequence",
            "norm": "sequence",
        }

    def _init_parameters(self) -> None:
        """Initialise as in GPT-2: normal weights, smaller in layers before a residual sum, and zero biases."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                depth = 2 * self.config.layers if name.endswith("project.weight") else 1
                nn.init.normal_(parameter, std=_INIT_STD / math.sqrt(depth))


class TransformerBlock(nn.Module):
    """Transformer block: adds causal self-attention, then a feed-forward network, to the input `(N, T, hidden)`."""

    def __init__(self, config: GPTConfig, ffn: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads)
        self.ffn_norm = nn.LayerNorm(config.hidden)
        self.ffn = feed_forward(config.hidden, config.ffn_width) if ffn is None else ffn

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        fed_forward: Tensor = self.ffn(self.ffn_norm(x))
        return x + fed_forward


def feed_forward(hidden: int, width: int) -> nn.Sequential:
    """Return a feed-forward network from and to `(..., hidden)`, with the inner width `width`."""
    return nn.Sequential(OrderedDict(widen=nn.Linear(hidden, width), narrow=ActivateAndNarrow(width, hidden)))


class Attention(nn.Module):
    """Causal self-attention on `(N, T, hidden)`; one linear layer computes queries, keys and values."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.core = AttentionCore(hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, -1, self.head_size)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.core(query, key, value)
        return mixed


class AttentionCore(CheapToRecompute):
    """Scaled dot-product attention, and the output projection of the concatenated heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, hidden)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention output `(N, T, hidden)`; each argument has shape `(N, heads, T, hidden / heads)`."""
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.project(heads.transpose(1, 2).flatten(2))
        return mixed


class ActivateAndNarrow(CheapToRecompute):
    """GELU (in the tanh approximation of GPT-2), and the linear layer back to the hidden size."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape `(N, T, hidden)` for an input of shape `(N, T, width)`."""
        narrowed: Tensor = self.project(functional.gelu(x, approximate="tanh"))
        return narrowed
