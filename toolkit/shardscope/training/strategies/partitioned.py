"""Base class of strategies whose optimizer updates only this rank's pieces of the parameters.

The optimizer updates plain tensors, which are views of this rank's pieces and have the names of the whole parameters.
So it can use fused kernels, and avoids the overhead of DTensors. Checkpoints store its state under the same names as in
any other strategy and with the shapes of whole parameters, so any number of ranks and any strategy can load it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.training.optim import TrainedParameters, built_by
from shardscope.training.optim.state import STEP, fill_in_state
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
        start_alike(model)
        module = super().setup(model)
        self.parameters = [piece.parameter for piece in self.pieces]
        self.precision.share_overflow = largest_over_ranks
        return module

    def build_optimizer(self) -> torch.optim.Optimizer:
        parameters = TrainedParameters(
            [(piece.name, piece.parameter) for piece in self.pieces], reduce_squares=self.reduce_squares,
            reduce_grad_square=self.reduce_grad_square, duplicate_grad_params=self.duplicate_grad_params,
            dimensions={piece.name: piece.whole.ndim for piece in self.pieces},
        )  # fmt: skip
        return built_by(self.job.optimizer, parameters)

    @abstractmethod
    def join(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Combine the ranks' pieces of a state tensor into tensors (or DTensors) with the shapes of whole parameters.

        Args:
            parts: This rank's pieces, by parameter name.
        """

    @abstractmethod
    def part(self, piece: ParameterShare, whole: Tensor) -> Tensor:
        """Return this rank's piece of `whole`, a tensor that `join` returned."""

    def checkpoint_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        fill_in_state(optimizer)
        state = {
            f"state.{name}.{key}": value
            for key in self._state_keys(optimizer)
            for name, value in self._whole_state(optimizer, key).items()
        }
        return {"model": self.model_state(), "optimizer": state}

    def load_checkpoint_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        self.model.load_state_dict(state["model"])
        saved = state["optimizer"]
        for key in self._state_keys(optimizer):
            for piece in self.pieces:
                mine, value = optimizer.state[piece.parameter][key], saved.get(f"state.{piece.name}.{key}")
                if value is not None:
                    mine.copy_(value if key == STEP else self.part(piece, value))

    def _state_keys(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the keys of the optimizer state of a parameter; empty for SGD without momentum."""
        state = optimizer.state.get(self.pieces[0].parameter, {})
        return [key for key, value in state.items() if isinstance(value, Tensor)]

    def _whole_state(self, optimizer: torch.optim.Optimizer, key: str) -> dict[str, Tensor]:
        parts = {piece.name: optimizer.state[piece.parameter][key] for piece in self.pieces}
        return parts if key == STEP else self.join(parts)
