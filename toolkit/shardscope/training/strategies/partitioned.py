"""Base class of strategies whose optimizer updates only this rank's pieces of the parameters.

The optimizer updates plain tensors, which are views of this rank's pieces and have the names of the whole parameters.
So it can use fused kernels, and avoids the overhead of DTensors. Checkpoints store its state under the same names as in
any other strategy and with the shapes of whole parameters, so any number of ranks and any strategy can load it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardscope.training.optim import TrainedParameters, built_by
from shardscope.training.optim.holding import Holding, digest_of
from shardscope.training.sharding import largest_over_ranks, start_alike
from shardscope.training.strategies.base import RankStrategy


@dataclass(frozen=True)
class ParameterShare:
    """This rank's piece of a parameter; the piece is empty if the rank has no element of the parameter."""

    name: str
    whole: nn.Parameter
    """The model's parameter: the whole tensor, or a DTensor."""
    parameter: nn.Parameter
    """The tensor that the optimizer updates: a view of this rank's piece."""


class Partitioned(RankStrategy):
    """Base class of strategies whose optimizer updates only this rank's pieces; a subclass sets `pieces` in `wrap`."""

    pieces: list[ParameterShare]
    """This rank's piece of each trained parameter; the same parameters in the same order on every rank."""

    def setup(self, model: nn.Module) -> nn.Module:
        if self.of_experts is None:  # otherwise ranks have different experts, and `divide_model` has done it
            start_alike(model, self.context.group)
        module = super().setup(model)
        self._hold()
        return module

    def _hold(self) -> None:
        """Update this rank's pieces instead of whole parameters."""
        self.parameters = [parameter for _, parameter in self.updated_parameters]
        self.precision.share_overflow = partial(largest_over_ranks, group=self.context.group)

    def build_optimizer(self) -> torch.optim.Optimizer:
        parameters = TrainedParameters(
            self.updated_parameters, reduce_squares=self.reduce_squares,
            reduce_grad_square=self.reduce_grad_square, duplicate_grad_params=self.duplicate_grad_params,
            dimensions=self.dimensions,
        )  # fmt: skip
        return built_by(self.job.optimizer, parameters)

    @property
    def dimensions(self) -> Mapping[str, int]:
        of_experts = {} if self.of_experts is None else self.of_experts.dimensions
        return {**of_experts, **{piece.name: piece.whole.ndim for piece in self.pieces}}

    @property
    def updated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        own = [(piece.name, piece.parameter) for piece in self.pieces]
        if self.of_experts is None:
            return own
        pieces = {**dict(self.of_experts.updated_parameters), **dict(own)}
        named = self.model.named_parameters()
        return [(name, pieces[name]) for name, whole in named if whole.requires_grad and name in pieces]

    @property
    def holding(self) -> Holding:
        held = [(piece.name, tuple(piece.parameter.shape)) for piece in self.pieces]
        pieces = {piece.name: piece for piece in self.pieces}
        own = _Pieces(f"{self.layout} {digest_of(held)}", self, pieces)
        return own if self.of_experts is None else _WithExperts.of(own, self.of_experts.holding)

    @abstractmethod
    def join(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Combine the ranks' pieces of a state tensor into tensors (or DTensors) with the shapes of whole parameters.

        Args:
            parts: This rank's pieces, by parameter name; of the same parameters and dtypes on all ranks.
        """

    @abstractmethod
    def empty(self, piece: ParameterShare, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor (or DTensor) with the shape of the whole parameter."""

    @abstractmethod
    def part(self, piece: ParameterShare, whole: Tensor) -> Tensor:
        """Return this rank's piece of `whole`, a tensor that `join` or `empty` returned."""


@dataclass(frozen=True)
class _Pieces(Holding):
    strategy: Partitioned
    pieces: Mapping[str, ParameterShare]

    is_split: ClassVar[bool] = True

    def join(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self.strategy.join(parts)

    def part(self, name: str, whole: Tensor) -> Tensor:
        return self.strategy.part(self.pieces[name], whole).clone()

    def whole(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return self.strategy.empty(self.pieces[name], dtype)

    def shape(self, name: str, held: Tensor) -> tuple[int, ...]:  # noqa: ARG002
        return tuple(self.pieces[name].whole.shape)


@dataclass(frozen=True)
class _WithExperts(Holding):
    """How ranks hold parameters if those of experts are shared with fewer ranks than the others."""

    own: _Pieces
    experts: Holding

    is_split: ClassVar[bool] = True

    @classmethod
    def of(cls, own: _Pieces, experts: Holding) -> _WithExperts:
        return cls(f"{own.layout} experts {experts.layout}", own, experts)

    def _of(self, name: str) -> Holding:
        return self.own if name in self.own.pieces else self.experts

    def join(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        sides = [
            each.join({name: part for name, part in parts.items() if self._of(name) is each})
            for each in (self.own, self.experts)
        ]
        return {name: tensor for side in sides for name, tensor in side.items()}

    def part(self, name: str, whole: Tensor) -> Tensor:
        return self._of(name).part(name, whole)

    def whole(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        return self._of(name).whole(name, like, dtype)

    def shape(self, name: str, held: Tensor) -> tuple[int, ...]:
        return self._of(name).shape(name, held)
