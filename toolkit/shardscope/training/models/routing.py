"""Routing of tokens to experts: choices, capacity, the balance loss, and the number of tokens that experts get.

A sequence is a group of tokens in the sense of GShard (Lepikhin et al., arXiv 2006.16668, section 2.2 and algorithm 1):
capacity and balance loss are those of each sequence, so they do not depend on how a batch is split. If each rank of a
context group has a part of every sequence, the ranks add up the choices and probabilities of their parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from shardscope.spec.mixture import RoutedMixture
from shardscope.training import _compat
from shardscope.training.places import places_of


class Sequences(Protocol):
    """How sequences are divided over the ranks of a context group, for routers; see `SequenceSplit`."""

    @property
    def own_places(self) -> list[int]:
        """Places of this rank's parts among all parts of a sequence."""

    def of_all_parts(self, own: Tensor) -> Tensor:
        """Return the numbers `(N, parts, ...)` of all parts, in the order of the sequence, for those of the own."""

    def mean(self, own: Tensor) -> Tensor:
        """Return the mean over all ranks of a tensor, through which gradients flow back to all ranks."""


class Routes(NamedTuple):
    """The experts of each token of `N` sequences of `T` tokens, of which each has `k` choices among `E` experts."""

    experts: Tensor
    """Number of the expert of each choice, `(N, T, k)`; the first choice has the highest probability."""
    weights: Tensor
    """Weight of each choice in the token's output, `(N, T, k)`."""
    is_kept: Tensor | None
    """Whether the expert has room for the token, `(N, T, k)`; None if no token is dropped."""
    balance: Tensor
    """Balance loss of each sequence, `(N,)`, without the weight that it has in the loss."""


@dataclass
class Tally:
    """Numbers of tokens that a layer's router has sent to each expert since the last `take`.

    Attributes:
        assigned: Choices of each expert, `(E,)`, with those that were dropped.
        dropped: Choices of each expert that were dropped, `(E,)`.
        balance: Sum of the sequences' balance losses.
        sequences: Number of sequences.
    """

    assigned: Tensor | None = None
    dropped: Tensor | None = None
    balance: Tensor | None = None
    sequences: int = 0
    is_on: bool = field(default=False, compare=False)
    """Whether numbers are added; turned on for the steps of a job."""

    def add(self, assigned: Tensor, kept: Tensor, balance: Tensor) -> None:
        """Add the choices of each expert, and those that were kept, `(N, E)`, with the sequences' balance losses."""
        sums = assigned.sum(0), (assigned - kept).sum(0), balance.detach().sum()
        before = self.assigned, self.dropped, self.balance
        self.assigned, self.dropped, self.balance = (
            new if old is None else old + new for old, new in zip(before, sums, strict=True)
        )
        self.sequences += len(assigned)

    def take(self) -> Tally:
        """Return the numbers so far, and start again from zero."""
        taken = Tally(self.assigned, self.dropped, self.balance, self.sequences)
        self.assigned = self.dropped = self.balance = None
        self.sequences = 0
        return taken


class Router(nn.Linear):
    """Scores each token for each expert, and chooses the `k` with the highest probability.

    Probabilities are computed in fp32 at least, also under autocast (Fedus et al., arXiv 2101.03961, section 2.4).
    """

    def __init__(self, hidden: int, mixture: RoutedMixture) -> None:
        super().__init__(hidden, mixture.experts, bias=mixture.router_bias)
        self.mixture = mixture
        self.tally = Tally()
        self.sequences: Sequences | None = None
        """How the sequences are divided over ranks; None if this rank has whole ones."""

    def forward(self, x: Tensor) -> Routes:  # type: ignore[override]
        """Return the routes of the tokens `(N, T, hidden)`.

        With several choices, their weights are their probabilities divided by the sum of these (GShard, algorithm 1);
        with one choice, its probability (Switch Transformers, equation 2).
        """
        with torch.autocast(x.device.type, enabled=False):
            exact = torch.promote_types(self.weight.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(exact)
            scores = functional.linear(x.to(exact), self.weight.to(exact), bias)
            probabilities = scores.softmax(-1)
            weights, experts = probabilities.topk(self.mixture.active, dim=-1)
            if self.mixture.active > 1:
                weights = weights / weights.sum(-1, keepdim=True)
            own = [0] if self.sequences is None else self.sequences.own_places
            one_hot = _one_hot(experts, self.mixture.experts)
            chosen = one_hot.unflatten(1, (len(own), -1))  # (N, parts, tokens, k, E)
            mean, counts = probabilities.mean(1), chosen.sum(2)
            assigned = counts.sum((1, 2))
            if self.sequences is not None:
                mean, counts = self.sequences.mean(mean), self.sequences.of_all_parts(counts)
            balance = balance_of(mean, counts.sum((1, 2)))
            if self.sequences is not None:
                weights = _Tied.apply(weights, balance)  # type: ignore[no-untyped-call]
            is_kept = self._within_capacity(experts, chosen, counts, own)
        if self.tally.is_on and self.training and not _compat.is_in_backward():
            kept = assigned
            if is_kept is not None:
                kept = (one_hot * is_kept[..., None]).sum((1, 2))
            self.tally.add(assigned, kept, balance)
        return Routes(experts, weights, is_kept, balance)

    def _within_capacity(
        self, experts: Tensor, chosen: Tensor, counts: Tensor, own: list[int]
    ) -> Tensor | None:
        """Return whether each choice fits in its expert's capacity: first choices are placed before second ones.

        Args:
            experts: Number of the expert of each choice, `(N, T, k)`.
            chosen: The same as one-hot numbers, by part of the sequence, `(N, parts, tokens, k, E)`.
            counts: Choices of each expert in each part of whole sequences, `(N, all parts, k, E)`.
            own: Places of the parts among all parts.
        """
        parts = counts.shape[1]
        capacity = self.mixture.capacity(chosen.shape[2] * parts)
        if capacity is None:
            return None
        in_order = counts.transpose(1, 2).flatten(1, 2)  # (N, k parts, E)
        before = (in_order.cumsum(1) - in_order).unflatten(1, (-1, parts)).transpose(1, 2)[:, own]
        taken = chosen.cumsum(2) + before[:, :, None]  # with the choice itself
        place: Tensor = taken.flatten(1, 2).gather(-1, experts[..., None]).squeeze(-1)
        return place <= capacity


class _Tied(torch.autograd.Function):
    """Returns the first tensor; its backward pass also runs that of the second, with a gradient of zero.

    The ranks of a context group average probabilities in their backward passes, so all of them must get there, also
    those whose loss does not depend on the balance loss.
    """

    @staticmethod
    def forward(ctx: Any, returned: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return returned.view_as(returned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (other,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(other)


def balance_of(mean: Tensor, assigned: Tensor) -> Tensor:
    """Return the balance loss of each sequence, `(N,)`: ``E sum_i f_i P_i``, which is 1 for an even load.

    f_i is the fraction of a sequence's choices that are expert i, with those that are dropped, and P_i the mean
    probability of expert i (Fedus et al., arXiv 2101.03961, equations 4 to 6; with several choices, f_i counts them
    all, as in DeepSeek-V2's balance loss of a sequence, arXiv 2405.04434, equations 23 to 25).

    Args:
        mean: Mean probability of each expert over the tokens of a sequence, `(N, E)`.
        assigned: Choices of each expert, `(N, E)`.
    """
    chosen = assigned.to(mean.dtype)
    fractions = chosen / chosen.sum(-1, keepdim=True)
    return mean.shape[-1] * (fractions * mean).sum(-1)


def _one_hot(experts: Tensor, count: int) -> Tensor:
    """Return the one-hot encoding of expert numbers `(...)`, as integers `(..., count)`."""
    return (experts[..., None] == places_of(count, experts.device)).long()


class SortedChoices(NamedTuple):
    """The choices that are kept, sorted by expert; choice c is choice ``c % k`` of token ``c // k``."""

    choices: Tensor
    """Numbers of the choices, expert by expert, and in the order of the tokens for each."""
    counts: list[int]
    """Number of choices of each expert."""

    @classmethod
    def of(cls, routes: Routes, mixture: RoutedMixture) -> SortedChoices:
        """Return the order of the choices of all sequences.

        Tensors without values, as in a trace of shapes, stand for an even load: the sizes of a trace are then those of
        a step without drops, or with every expert at its capacity if that is less.
        """
        flat, experts = routes.experts.flatten(), mixture.experts
        if flat.is_meta or isinstance(flat, FakeTensor):
            samples, tokens, _ = routes.experts.shape
            capacity = mixture.capacity(tokens)
            return cls._even(flat, experts, None if capacity is None else samples * capacity)
        if routes.is_kept is not None:
            flat = torch.where(routes.is_kept.flatten(), flat, experts)  # dropped choices come last
        choices = flat.argsort(stable=True)
        counts: list[int] = flat.bincount(minlength=experts + 1)[:experts].tolist()
        return cls(choices[: sum(counts)], counts)

    @classmethod
    def _even(cls, flat: Tensor, experts: int, most: int | None) -> SortedChoices:
        size, rest = divmod(len(flat), experts)
        counts = [size + (number < rest) for number in range(experts)]
        if most is not None:
            counts = [min(count, most) for count in counts]
        return cls(flat.argsort(stable=True)[: sum(counts)], counts)
