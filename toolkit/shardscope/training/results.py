"""Tensors as results of a layer, which the next layer may change in place; PyTorch refuses that for leaves."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.autograd import Function


def as_result(tensor: Tensor) -> Tensor:
    """Return a tensor with the same storage as the result of an operation, if it requires a gradient."""
    return cast("Tensor", _Result.apply(tensor)) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


class _Result(Function):
    """Identity function."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient
