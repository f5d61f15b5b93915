"""Operations of autograd between replicated activations and the divided layers of a tensor group.

Source:
    Shoeybi et al., arXiv 1909.08053, section 3; with sequence parallelism, Korthikanti et al., arXiv 2205.05198,
    section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardscope.training.tensor.axis import TensorAxis

Call = Callable[[Tensor], Tensor]


class Enter(Function):
    """Passes a replicated activation to divided columns: identity forward, all-reduce of its gradient backward."""

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
    """Sums the partial outputs of divided rows: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: TensorAxis) -> Tensor:
        ctx.mark_dirty(partial)
        axis.sum_(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004 - torch's signature
        return gradients[0], None


class _WithAdjoint(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, adjoint: Call) -> Tensor:
        ctx.adjoint = adjoint
        return call(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.adjoint(gradients[0]), None, None


def with_adjoint(x: Tensor, call: Call, adjoint: Call) -> Tensor:
    """Return ``call(x)``, a new tensor, whose gradient the backward pass gives to `adjoint`.

    Args:
        x: An activation.
        call: Linear function of it, such as an all-gather; autograd does not look inside.
        adjoint: The function from the gradient of the result to that of `x`, such as a reduce-scatter.
    """
    found: Tensor = _WithAdjoint.apply(x, call, adjoint)  # type: ignore[no-untyped-call]
    return found


class GatherColumns(Function):
    """Gathers the sequences `(N, T, inputs)`, and returns a rank's columns `(N, T, outputs / size)` of a linear layer.

    Only the rank's part of the sequences is saved: the backward pass gathers them again, for the weight's gradient.
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
            of_part = ctx.axis.reduce_scatter(gradient @ weight)
        return of_part, of_weight, of_bias, None


class SumGradients(Function):
    """Passes parameters to a layer that processes a part of the tokens: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        ctx.axis.sum_(flat, is_fixed=True)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return None, *(
            part.view(gradient.shape).to(gradient.dtype)
            for part, gradient in zip(parts, gradients, strict=True)
        )
