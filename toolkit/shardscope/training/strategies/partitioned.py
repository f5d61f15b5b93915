"""Base of strategies whose optimizer updates only this rank's pieces of the parameters.

The optimizer works on plain tensors, views of the rank's shards, under the names of the whole parameters. It therefore
runs in the fused kernels and never through DTensor's dispatch. Checkpoints hold its state under the same names as every
other strategy's and in the shape of the whole, so that any number of ranks, and any strategy, can load it.
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
    """This rank's part of a parameter; empty if the rank has none of it."""

    name: str
    whole: nn.Parameter
    parameter: nn.Parameter
    """The tensor that the optimizer updates: a view of this rank's part."""


class Partitioned(RankStrategy):
    """Base class whose subclasses set `pieces` in `wrap`, for the same parameters in the same order on every rank."""

    pieces: list[ParameterShare]

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
        """Join one state tensor per piece, by name, into tensors (or DTensors) shaped like the whole parameters."""

    @abstractmethod
    def part(self, piece: ParameterShare, whole: Tensor) -> Tensor:
        """Cut a tensor that `join` made back to this rank's piece."""

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
        """Keys of the optimizer state per parameter; empty for plain SGD."""
        state = optimizer.state.get(self.pieces[0].parameter, {})
        return [key for key, value in state.items() if isinstance(value, Tensor)]

    def _whole_state(self, optimizer: torch.optim.Optimizer, key: str) -> dict[str, Tensor]:
        parts = {piece.name: optimizer.state[piece.parameter][key] for piece in self.pieces}
        return parts if key == STEP else self.join(parts)
