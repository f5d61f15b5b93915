"""The few list operations that LAMB and LARS consist of, each in its fastest form for the device.

Measured on CPU: a loop over tensors still in the cache beats `torch._foreach_*`, `torch.dot` beats
`torch.linalg.vector_norm`, and the fused AdamW kernel beats both forms of the moment update. On other
devices kernel launches dominate, so each operation is one call over the whole list. On a CPU, every
further operation between two kernels that have swept the cache costs as much as a whole small layer, so
per-layer numbers are Python floats there. No value is read back from any other device.
"""
# ruff: noqa: SLF001 - torch documents its foreach operations under these names

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shardscope.training import _compat

Tensors = list[Tensor] | tuple[Tensor, ...]

Number = TypeVar("Number", float, Tensor)
"""A quantity of one layer as a float, or of many layers as a vector."""

Scalars = list[float] | Tensor
"""One number for each layer: floats on a CPU, elsewhere a float64 vector on the device."""


@dataclass(frozen=True, slots=True)
class AdamRun:
    """Tensors that take one Adam step together. Tensors at the same index have equal shape, dtype and device.

    `updates` is overwritten: from ``x`` to ``x - r``, where ``r`` is Adam's bare update. `steps` are 0-d
    float32 tensors on the host, which already count this step.
    """

    weights: Tensors
    grads: Tensors
    exp_avgs: Tensors
    exp_avg_sqs: Tensors
    updates: Tensors
    steps: Tensors


@dataclass(frozen=True, slots=True)
class AdamMoments:
    """How Adam's two moments advance and combine into the update ``r``."""

    betas: tuple[float, float]
    eps: float
    bias_correction: bool
    grad_averaging: bool

    @property
    def fit_fused_kernel(self) -> bool:
        """Whether the fused kernel applies; it always averages the gradient into the first moment."""
        return self.grad_averaging and _compat.HAS_FUSED_ADAMW

    def counts(self, steps: Tensors) -> list[float]:
        """Step counts for the bias corrections; infinity makes both corrections 1."""
        return [float(step) for step in steps] if self.bias_correction else [math.inf] * len(steps)


def fused_moments_(run: AdamRun, moments: AdamMoments) -> None:
    """Advance both moments and subtract the update, in one pass over memory.

    The fused kernel computes ``w -= lr * r``. With `updates` as the weights and a learning rate of 1, it
    leaves the bare update in `updates`.
    """
    _compat.fused_adamw_(
        run.updates,
        run.grads,
        run.exp_avgs,
        run.exp_avg_sqs,
        run.steps if moments.bias_correction else [torch.full((), math.inf)] * len(run.steps),
        betas=moments.betas,
        eps=moments.eps,
    )


def plain_moments_(run: AdamRun, moments: AdamMoments) -> None:
    """Do the same as `fused_moments_` in public operations, for every device, dtype and variant."""
    beta1, beta2 = moments.betas
    counts = moments.counts(run.steps)
    torch._foreach_mul_(run.exp_avgs, beta1)
    torch._foreach_add_(run.exp_avgs, run.grads, alpha=1 - beta1 if moments.grad_averaging else 1.0)
    torch._foreach_mul_(run.exp_avg_sqs, beta2)
    torch._foreach_addcmul_(run.exp_avg_sqs, run.grads, run.grads, value=1 - beta2)
    denominators = torch._foreach_sqrt(run.exp_avg_sqs)
    torch._foreach_div_(denominators, [math.sqrt(1 - beta2**count) for count in counts])
    torch._foreach_add_(denominators, moments.eps)
    torch._foreach_addcdiv_(
        run.updates, run.exp_avgs, denominators, [-1 / (1 - beta1**count) for count in counts]
    )


def scale_into(out: Tensors, tensors: Tensors, factor: float) -> None:
    """``out = factor * tensors``; a factor of 0 writes zeros, whatever the tensors hold."""
    if factor == 0:
        torch._foreach_zero_(out)
    elif tensors[0].is_cpu:
        for target, tensor in zip(out, tensors, strict=True):
            torch.mul(tensor, factor, out=target)
    else:
        torch._foreach_copy_(out, tensors)
        torch._foreach_mul_(out, factor)


def sums_of_squares(tensors: Tensors) -> Tensors:
    """Sum of squares of each tensor, as 0-d tensors of at least single precision."""
    first = tensors[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    if first.is_cpu and first.dtype == wide and all(tensor.dim() == 1 for tensor in tensors):
        return [torch.dot(tensor, tensor) for tensor in tensors]
    norms = torch._foreach_norm(tensors, 2, dtype=wide)
    return torch._foreach_mul(norms, norms)


def add_scaled_(tensors: Tensors, directions: Tensors, factor: float, scales: Scalars) -> None:
    """``tensors += factor * scales * directions``, one entry of `scales` for each tensor."""
    if isinstance(scales, Tensor):
        factors = (factor * scales).to(tensors[0].dtype).unbind()
        torch._foreach_add_(tensors, torch._foreach_mul(directions, factors))
    else:
        for tensor, direction, scale in zip(tensors, directions, scales, strict=True):
            tensor.add_(direction, alpha=factor * scale)


def at_most(number: Number, bound: float) -> Number:
    """The smaller of the number and the bound; NaN stays NaN."""
    return number.clamp(max=bound) if isinstance(number, Tensor) else min(number, bound)
