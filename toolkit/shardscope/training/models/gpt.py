"""GPT-2: pre-LayerNorm blocks, learned positions, tied embeddings; no dropout."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardscope.errors import DataError
from shardscope.spec.models import GPTConfig
from shardscope.training.models._blocks import CheapToRecompute, ForwardPart

_INIT_STD = 0.02


class GPT(nn.Module):
    """Tokens `(N, T)` to scores of each next token `(N, T, vocab)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self._init_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores `(N, T, vocab)`.

        Raises:
            DataError: The sequences are longer than the model's positions.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.score(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens `(N, T)` to the residual stream `(N, T, hidden)`."""
        length = tokens.shape[1]
        if length > self.config.seq:
            raise DataError(
                f"seq={length} is longer than the {self.config.seq} positions of the model; cut the sequences"
            )
        stream: Tensor = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return stream

    def score(self, x: Tensor) -> Tensor:
        """The residual stream to scores `(N, T, vocab)`."""
        scores: Tensor = functional.linear(self.norm(x), self.tokens.weight)
        return scores

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Embedding, blocks and head, in order; embedding and head share the tokens' weight."""
        embedding = ForwardPart(self.embed, self.tokens, self.positions)
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("embedding", embedding), *blocks, ("head", ForwardPart(self.score, self.norm, self.tokens))]

    def _init_parameters(self) -> None:
        """GPT-2's scheme: normal weights, smaller where a block joins the residual stream, zero biases."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = 2 * self.config.layers if name.endswith("project.weight") else 1
                nn.init.normal_(parameter, std=_INIT_STD / math.sqrt(depth))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class TransformerBlock(nn.Module):
    """Causal self-attention, then a feed-forward network, each added to the residual stream `(N, T, hidden)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads)
        self.ffn_norm = nn.LayerNorm(config.hidden)
        self.ffn = nn.Sequential(
            OrderedDict(
                widen=nn.Linear(config.hidden, config.ffn_width),
                narrow=ActivateAndNarrow(config.ffn_width, config.hidden),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        fed_forward: Tensor = self.ffn(self.ffn_norm(x))
        return x + fed_forward


class Attention(nn.Module):
    """Causal self-attention: one matrix product computes queries, keys and values from `(N, T, hidden)`."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.core = AttentionCore(hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.core(query, key, value)
        return mixed


class AttentionCore(CheapToRecompute):
    """Softmax of queries with keys, applied to the values, and the projection of the joined heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, hidden)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Three tensors `(N, heads, T, hidden / heads)` to `(N, T, hidden)`."""
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.project(heads.transpose(1, 2).flatten(2))
        return mixed


class ActivateAndNarrow(CheapToRecompute):
    """GELU (GPT-2's tanh form) and the projection back to the residual stream."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`(N, T, width)` to `(N, T, hidden)`."""
        narrowed: Tensor = self.project(functional.gelu(x, approximate="tanh"))
        return narrowed
