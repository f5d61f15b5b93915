"""The operations at the borders of a divided part of a model.

Source:
    Shoeybi et al., arXiv 1909.08053, section 3; with parts of sequences, Korthikanti et al., arXiv 2205.05198,
    section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

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


# With parts of sequences.


class Cut(Function):
    """Keeps a rank's part of whole sequences forward, and gathers the parts of their gradient backward."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.own(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.axis.gather(gradients[0]), None


class Join(Function):
    """Gathers parts of sequences forward, and keeps a rank's part of their gradient, equal on all ranks, backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.gather(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.axis.own(gradients[0]), None


class JoinEnter(Function):
    """Gathers parts of sequences for a layer's divided columns forward, and scatters the sum of gradients backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.gather(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.axis.scatter_sum(gradients[0]), None


class JoinedColumns(Function):
    """A rank's columns of a linear layer's output for whole sequences, of which each rank has a part.

    Only the part is saved: the backward pass gathers the sequences again, for the gradient of the weight.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(part, weight)
        return functional.linear(axis.gather(part), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        part, weight = ctx.saved_tensors
        gradient, needed = gradients[0], ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        of_part = of_weight = of_bias = None
        if needed[1]:
            of_weight = rows.t() @ ctx.axis.gather(part).flatten(0, -2)
        if needed[2]:
            of_bias = rows.sum(0)
        if needed[0]:
            of_part = ctx.axis.scatter_sum(gradient @ weight)
        return of_part, of_weight, of_bias, None


class LeaveInParts(Function):
    """Adds up what the ranks' parts of a layer have computed, and keeps a rank's part of the sequences."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.scatter_sum(partial)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.axis.gather(gradients[0]), None


class SumGradients(Function):
    """Gives parameters to a layer that sees a part of the sequences: sums their gradients over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        together = torch.cat([gradient.reshape(-1) for gradient in gradients])
        ctx.axis.sum_(together, is_fixed=True)
        parts = together.split([gradient.numel() for gradient in gradients])
        return None, *(
            part.view(gradient.shape).to(gradient.dtype)
            for part, gradient in zip(parts, gradients, strict=True)
        )
