"""The two operations at the borders of a divided part of a model (Shoeybi et al., arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardscope.training.tensor.axis import TensorAxis


class Enter(Function):
    """Gives a whole activation to the ranks' parts of a layer: identity forward, a sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous()  # of a matrix product, so nothing else refers to it
        ctx.axis.sum_(gradient)
        return gradient, None


class Leave(Function):
    """Adds up what the ranks' parts of a layer have computed: a sum over the ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: TensorAxis) -> Tensor:
        ctx.mark_dirty(partial)
        axis.sum_(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004 - torch's signature
        return gradients[0], None
