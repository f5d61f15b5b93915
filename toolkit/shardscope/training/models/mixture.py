"""GPT with a mixture of experts in place of the feed-forward part, as in GShard and Switch Transformers.

    MixtureGPT
    └── blocks: MixtureBlock, or TransformerBlock in the first `dense_layers` layers
        └── ffn: Experts         router, a feed-forward network for each expert, and shared ones for all tokens

In training, the model returns its logits with the balance loss, which a loss that a job names adds to its own value; in
evaluation, it returns logits only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.models.gpt import GPT, TransformerBlock, feed_forward
from shardscope.training.models.routing import Order, Router


class MixtureGPT(GPT):
    """GPT with experts, from tokens `(N, T)` to next-token logits `(N, T, vocab)`."""

    def make_block(self, config: GPTConfig, number: int) -> nn.Module:
        assert config.mixture is not None
        return TransformerBlock(config) if number < config.mixture.dense_layers else MixtureBlock(config)

    def forward(self, tokens: Tensor) -> Any:
        """Return the logits; in training, a mapping with ``logits`` and ``balance_loss``.

        The balance loss is a scalar: the sum over layers of the mean over sequences, times `RoutedMixture.balance`.
        """
        assert self.config.mixture is not None
        x, balances = self.embed(tokens), list[Tensor]()
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, balance = x
                balances.append(balance)
        scores = self.score(x)
        weight = self.config.mixture.balance
        if not self.training or not weight:
            return scores
        return {"logits": scores, "balance_loss": weight * torch.stack(balances).sum(0).mean()}

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Refuse to be split into stages.

        Raises:
            SpecError: Always.
        """
        raise SpecError(
            "a model with experts cannot be split into stages yet, because stages do not pass its balance loss on; use "
            "a data-parallel strategy"
        )

    def tensor_plan(self) -> dict[str, str]:
        """Return how tensor parallelism divides each layer, by name: whole heads, and the networks of all experts.

        Experts that drop tokens stay whole, so that ranks send the same bytes in every step.
        """
        mixture, plan = self.config.mixture, super().tensor_plan()
        assert mixture is not None
        is_planned = [".attention.", *([".ffn."] if mixture.dense_layers else ())]
        plan = {name: division for name, division in plan.items() if any(part in name for part in is_planned)}
        parts = {"experts.*": mixture.capacity_factor is None, "shared": mixture.shared_ffn > 0}
        for part in (name for name, is_divided in parts.items() if is_divided):
            plan[f"blocks.*.ffn.{part}.widen"] = "columns"
            plan[f"blocks.*.ffn.{part}.narrow.project"] = "rows"
        return plan


class MixtureBlock(TransformerBlock):
    """Transformer block with experts; returns its output `(N, T, hidden)` and the sequences' balance losses `(N,)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        assert config.mixture is not None
        self.ffn: nn.Module = Experts(config.hidden, config.mixture)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x + self.attention(self.attention_norm(x))
        mixed, balance = self.ffn(self.ffn_norm(x))
        return x + mixed, balance


class Experts(nn.Module):
    """Sends each token to some of the experts, and adds up what they return, and what the shared experts do."""

    def __init__(self, hidden: int, mixture: RoutedMixture) -> None:
        super().__init__()
        self.router = Router(hidden, mixture)
        self.experts = nn.ModuleList(feed_forward(hidden, mixture.ffn) for _ in range(mixture.experts))
        self.shared = feed_forward(hidden, mixture.shared_ffn) if mixture.shared_ffn else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output `(N, T, hidden)` and the balance loss of each sequence `(N,)` for `x` `(N, T, hidden)`."""
        routes = self.router(x)
        order = Order.of(routes, len(self.experts))
        active = routes.experts.shape[-1]
        tokens = order.choices // active
        returned = self.mixed(x.flatten(0, 1)[tokens], order.counts)
        weights = routes.weights.flatten()[order.choices].to(returned.dtype)
        summed = returned.new_zeros(x.shape).flatten(0, 1)
        summed = summed.index_add(0, tokens, returned * weights[:, None]).view(x.shape)
        return summed if self.shared is None else summed + self.shared(x), routes.balance

    def mixed(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Return the experts' outputs for tokens that are sorted by expert, of which each gets its count."""
        parts = tokens.split(
            counts
        )  # an expert without tokens computes too, so that it has a gradient, of zeros
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


def routers_of(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield the routers of a model with the names of their layers, in order."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield name, module.router
