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
from torch.nn import functional

from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.expert_axis import ExpertAxis
from shardscope.training.models._blocks import CheapToRecompute, ForwardPart
from shardscope.training.models.gpt import GPT, TransformerBlock, feed_forward
from shardscope.training.models.routing import Router, SortedChoices
from shardscope.training.tensor.axis import TensorAxis
from shardscope.training.tensor.functions import Enter, Leave

_ACTIVATION_DIMS = 3


class MixtureGPT(GPT):
    """GPT with experts, from tokens `(N, T)` to next-token logits `(N, T, vocab)`."""

    def make_block(self, config: GPTConfig, number: int) -> nn.Module:
        assert config.mixture is not None
        return TransformerBlock(config) if number < config.mixture.dense_layers else MixtureBlock(config)

    def forward(self, tokens: Tensor) -> Any:
        """Return the logits; in training, a mapping with ``logits`` and ``balance_loss``.

        The balance loss is that of each sequence, `(N,)`: the sum over layers, times `RoutedMixture.balance`.
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
        return {"logits": scores, "balance_loss": weight * torch.stack(balances).sum(0)}

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Return the embedding, the blocks and the head as named layers; see `GPT.pipeline_layers`.

        In training, layers pass the balance losses on with the activations, as one more number for each sequence. So
        the last stage has the whole loss, and the gradient of a layer's balance loss returns to it through the stages,
        with the weight of its micro-batch. Megatron-LM instead adds this gradient in each layer
        (``MoEAuxLossAutoScaler`` in ``moe_utils.py``), and sums the losses over stages only for its log.
        """
        embedding, *blocks, _ = super().pipeline_layers()
        return [
            embedding,
            *((name, self._passing_on(block)) for name, block in blocks),
            ("head", ForwardPart(self._score_and_balance, self.norm, self.tokens)),
        ]

    def _passing_on(self, block: nn.Module) -> nn.Module:
        if not isinstance(block, MixtureBlock):
            return block
        part = ForwardPart(lambda carried: self._pass_on(part, block, carried), block)
        part.training = self.training
        return part

    def _pass_on(self, part: ForwardPart, block: MixtureBlock, carried: Tensor) -> Tensor:
        """Apply a block to activations, or to what `_pass_on` returns for the block before it.

        Whether its balance loss is passed on depends on the mode of the model, as in `forward`, not on the block's own.
        """
        assert self.config.mixture is not None
        x, before = self._unpacked(carried)
        output: Tensor
        output, balance = block(x)
        if not part.training or not self.config.mixture.balance:
            return output
        total = balance if before is None else before + balance
        return torch.cat([output.flatten(1), total[:, None].to(output.dtype)], 1)

    def _score_and_balance(self, carried: Tensor) -> Any:
        assert self.config.mixture is not None
        x, balance = self._unpacked(carried)
        scores = self.score(x)
        if balance is None:
            return scores
        return {"logits": scores, "balance_loss": self.config.mixture.balance * balance}

    def _unpacked(self, carried: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the activations `(N, T, hidden)` and the sequences' balance losses `(N,)`, if there are any yet."""
        if carried.dim() == _ACTIVATION_DIMS:
            return carried, None
        return carried[:, :-1].unflatten(1, (-1, self.config.hidden)), carried[:, -1]

    def tensor_plan(self) -> dict[str, str]:
        """Return how tensor parallelism divides each layer, by name: whole heads, and the shared experts.

        The ranks of a tensor group have the same tokens. Each computes with whole routed experts, unless these are also
        distributed over an expert axis (see `ExpertTensorSplit`).
        """
        mixture = self.config.mixture
        assert mixture is not None
        plan = {name: division for name, division in super().tensor_plan().items() if ".attention." in name}
        dense = [f"{layer}.ffn" for layer in range(mixture.dense_layers)]
        for part in [*dense, *(["*.ffn.shared"] if mixture.shared_ffn else [])]:
            plan |= {f"blocks.{part}.widen": "columns", f"blocks.{part}.narrow.project": "rows"}
        return plan


class MixtureBlock(TransformerBlock):
    """Transformer block with experts; returns its output `(N, T, hidden)` and the sequences' balance losses `(N,)`."""

    def __init__(self, config: GPTConfig) -> None:
        assert config.mixture is not None
        super().__init__(config, Experts(config.hidden, config.mixture))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x + self.attention(self.attention_norm(x))
        mixed, balance = self.ffn(self.ffn_norm(x))
        return x + mixed, balance


class Experts(nn.Module):
    """Mixture of experts: sums the outputs of a token's experts by their weights, and those of the shared experts."""

    axis: ExpertAxis | None = None
    """The ranks over which the experts are distributed; None if each rank has all of them."""
    tensor_axis: TensorAxis | None = None
    """The ranks over which each routed expert is divided along its inner width; None if it is whole."""

    def __init__(self, hidden: int, mixture: RoutedMixture) -> None:
        super().__init__()
        self.router = Router(hidden, mixture)
        self.widen = GroupedLinear(mixture.experts, hidden, mixture.ffn)
        self.narrow = GroupedActivateAndNarrow(mixture.experts, mixture.ffn, hidden)
        self.shared = feed_forward(hidden, mixture.shared_ffn) if mixture.shared_ffn else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output `(N, T, hidden)` and the balance loss of each sequence `(N,)` for `x` `(N, T, hidden)`.

        If experts are divided, each rank combines its terms of the outputs, whose sum has the same size for every load.
        """
        routes = self.router(x)
        order = SortedChoices.of(routes, self.router.mixture)
        tokens = order.choices // routes.experts.shape[-1]
        sorted_tokens = self._entered(x).flatten(0, 1)[tokens]
        if self.axis is None:
            returned = self.compute(sorted_tokens, order.counts)
        else:
            returned = self.axis.dispatch_and_combine(
                sorted_tokens, order.counts, self.compute, self.token_flops
            )
        weights = self._entered(routes.weights).flatten()[order.choices].to(returned.dtype)
        summed = returned.new_zeros(x.shape).flatten(0, 1)
        summed = summed.index_add(0, tokens, returned * weights[:, None])
        if self.tensor_axis is not None:
            summed = Leave.apply(summed, self.tensor_axis)  # type: ignore[no-untyped-call]
        summed = summed.view(x.shape)
        return summed if self.shared is None else summed + self.shared(x), routes.balance

    def _entered(self, whole: Tensor) -> Tensor:
        """Return a tensor that the ranks have in common, for computation with their parts of experts."""
        if self.tensor_axis is None:
            return whole
        entered: Tensor = Enter.apply(whole, self.tensor_axis)  # type: ignore[no-untyped-call]
        return entered

    def of_each(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of which each expert has a row, with their names in this layer."""
        for part, layer in (("widen", self.widen), ("narrow.project", self.narrow.project)):
            yield from ((f"{part}.{name}", parameter) for name, parameter in layer.named_parameters())

    @property
    def token_flops(self) -> float:
        """FLOPs of one of this rank's experts, or of the rank's part of it, for one token."""
        weights = (self.widen.weight, self.narrow.project.weight)
        return float(sum(2 * weight.shape[-2] * weight.shape[-1] for weight in weights))

    def compute(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Return the outputs of this rank's experts for tokens that are sorted by expert; each gets its count."""
        outputs: Tensor = self.narrow(self.widen(tokens, counts), counts)
        return outputs


class GroupedLinear(nn.Module):
    """One linear layer per expert, as in a grouped GEMM; all weights are one tensor `(E, outputs, inputs)`."""

    adds_bias = True
    """Whether the output has the bias, which one rank of a tensor group adds for all if the inputs are divided."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs))
        for part in (*self.weight, *self.bias):
            nn.init.uniform_(part, -(inputs**-0.5), inputs**-0.5)  # as nn.Linear does

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Return the outputs for tokens `(R, inputs)` that are sorted by expert, of which each gets its count.

        An expert without tokens computes too, so that it has a gradient, of zeros.
        """
        # a bias that is not added has the same gradient as on the rank that adds it
        bias = self.bias if self.adds_bias else self.bias - self.bias.detach()
        parts = zip(tokens.split(counts), self.weight.unbind(), bias.unbind(), strict=True)
        return torch.cat([functional.linear(part, weight, bias) for part, weight, bias in parts])


class GroupedActivateAndNarrow(CheapToRecompute):
    """GELU as in `ActivateAndNarrow`, then each expert's linear layer back to the hidden size."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.project = GroupedLinear(experts, width, hidden)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """Return a tensor of shape `(R, hidden)` for an input of shape `(R, width)`."""
        narrowed: Tensor = self.project(functional.gelu(x, approximate="tanh"), counts)
        return narrowed


def experts_of(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yield the layers of a model that have experts, with their names, in order."""
    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, Experts))


def divided_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of experts of which this rank has a part."""
    for _, layer in experts_of(model):
        if layer.axis is not None:
            yield from (parameter for _, parameter in layer.of_each())
