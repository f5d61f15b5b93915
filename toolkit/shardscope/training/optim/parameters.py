"""The parameters that an optimizer updates on one rank, and the reductions for norms over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardscope.errors import SpecError, quoted
from shardscope.spec.optimizer import Optimizer
from shardscope.training.sharding import ReduceSquares


def built_by(spec: Optimizer, parameters: TrainedParameters) -> torch.optim.Optimizer:
    """Build the optimizer of a spec.

    Raises:
        SpecError: A user-defined spec built an object that is not a `torch.optim.Optimizer`.
    """
    built = spec.build(parameters)
    if not isinstance(built, torch.optim.Optimizer):
        raise SpecError(
            f"optimizer={spec.name!r} built {quoted(built)}; let it build a torch.optim.Optimizer"
        )
    return built


class TrainedParameters:
    """The named parameters that require a gradient; implements `shardscope.spec.optimizer.Parameters`.

    Args:
        named: As from ``model.named_parameters()``.
        reduce_squares: For shards: sums squared norms per layer over the ranks.
        reduce_grad_square: Sums the squared norm of all gradients over all ranks that hold distinct ones.
        dimensions: Number of dimensions of the whole tensor, by name, where a parameter is a flat piece of it; it
            decides which parameters are excluded. None uses the parameters' own.
        duplicate_grad_params: Parameters whose gradients another rank counts already in that square.
        is_freezable: Whether compression will freeze the second moment.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        reduce_squares: ReduceSquares | None = None,
        reduce_grad_square: ReduceSquares | None = None,
        dimensions: Mapping[str, int] | None = None,
        duplicate_grad_params: Sequence[nn.Parameter] = (),
        is_freezable: bool = False,
    ) -> None:
        self.named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.reduce_squares, self.reduce_grad_square = reduce_squares, reduce_grad_square
        self.duplicate_grad_params, self.is_freezable = duplicate_grad_params, is_freezable
        self._dimensions = dimensions or {}

    def groups(self, exclude: str = "none", **instead: Any) -> list[dict[str, Any]]:
        """One group, or two where biases and norms are excluded and get the settings `instead`; none is empty."""
        if exclude == "none":
            return [{"params": self.named}]
        kept = [item for item in self.named if self._dimensions_of(*item) > 1]
        excluded = [item for item in self.named if self._dimensions_of(*item) <= 1]
        groups: list[dict[str, Any]] = [{"params": kept}, {"params": excluded, **instead}]
        return [group for group in groups if group["params"]]

    def _dimensions_of(self, name: str, parameter: nn.Parameter) -> int:
        return self._dimensions.get(name, parameter.ndim)

    @property
    def take_fused(self) -> bool:
        """Whether torch has fused kernels for all parameters: floating-point, on a CPU, CUDA or MPS device."""
        return all(p.is_floating_point() and p.device.type in {"cpu", "cuda", "mps"} for _, p in self.named)
