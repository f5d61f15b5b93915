"""The parameters that an optimizer updates on one rank, and the functions that sum norms over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError, quoted
from shardscope.spec.optimizer import Optimizer
from shardscope.training.optim.state import note_as_built
from shardscope.training.sharding import ReduceSquares


def built_by(spec: Optimizer, parameters: TrainedParameters) -> torch.optim.Optimizer:
    """Build the optimizer that `spec` describes, for the given parameters.

    Raises:
        SpecError: The `build` method of a user-defined spec did not return a `torch.optim.Optimizer`,
            or one with groups that have no learning rate.
    """
    built = spec.build(parameters)
    if not isinstance(built, torch.optim.Optimizer):
        raise SpecError(
            f"optimizer={spec.name!r}: its build method returned {quoted(built)}; return a torch.optim.Optimizer"
        )
    if not all("lr" in group for group in built.param_groups):
        raise SpecError(
            f"optimizer={spec.name!r}: a parameter group of its {type(built).__name__} has no 'lr', so the job's "
            "learning rate and schedule would have no effect; give each group an 'lr' in the build method, even if the "
            "steps ignore it"
        )
    if any(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in _arguments_of_step(built)):
        raise SpecError(
            f"optimizer={spec.name!r}: the step method of its {type(built).__name__} needs a closure, but a strategy "
            "computes gradients before the step; use an optimizer whose step takes no argument"
        )
    note_as_built(built, lambda copies, alone: spec.build(parameters.of_copies(copies, alone=alone)))
    return built


def _arguments_of_step(built: torch.optim.Optimizer) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(built.step).parameters.values() if p.kind is not p.VAR_KEYWORD]


class TrainedParameters:
    """The named parameters that require grad; implements `shardscope.spec.optimizer.Parameters`.

    Args:
        named: Names and parameters, as from ``model.named_parameters()``.
        reduce_squares: Function that sums the squared norm of each layer over the ranks that have its shards; None if
            parameters are not sharded.
        reduce_grad_square: Function that sums the squared norm of all gradients over the ranks that have different
            gradients; None if each rank has all of them.
        dimensions: If parameters are flat pieces of tensors: for each name, the number of dimensions of the whole
            tensor, from which `groups` identifies biases and norms. None uses the parameters' own number of dimensions.
        duplicate_grad_params: Parameters whose gradients `reduce_grad_square` already counts on another rank.
        is_freezable: Whether the compression method will freeze the optimizer's second moment.
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

    def of_copies(self, copies: Mapping[Tensor, nn.Parameter], *, alone: bool) -> TrainedParameters:
        """Return copies of some of the parameters; if `alone`, without the functions that sum over ranks."""
        same = TrainedParameters([(name, copies[p]) for name, p in self.named if p in copies])
        if not alone:
            same.reduce_squares, same.reduce_grad_square = self.reduce_squares, self.reduce_grad_square
        same.duplicate_grad_params = [copies[p] for p in self.duplicate_grad_params if p in copies]
        same.is_freezable, same._dimensions = self.is_freezable, self._dimensions
        return same

    def groups(self, exclude: str = "none", **instead: Any) -> list[dict[str, Any]]:
        """Return the parameter groups for the optimizer, none of them empty.

        Args:
            exclude: ``"none"`` for a single group; otherwise biases and norms (parameters with at most one dimension)
                get a second group.
            instead: Settings of the second group.
        """
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
        """Whether PyTorch's fused kernels support all parameters: they must be floats on a CPU, CUDA or MPS device."""
        return all(p.is_floating_point() and p.device.type in {"cpu", "cuda", "mps"} for _, p in self.named)
