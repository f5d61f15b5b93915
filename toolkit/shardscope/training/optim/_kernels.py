"""Operations on lists of tensors for LAMB and LARS, each in the fastest form for the device.

On a CPU, by measurement: a loop over tensors that are still in the cache is faster than `torch._foreach_*`, `torch.dot`
is faster than `torch.linalg.vector_norm`, and the fused AdamW kernel is torch's fastest way to update the moments. Each
further PyTorch call between two kernels costs as much time as a small layer, so the values per layer (norms and trust
ratios) are Python floats on a CPU.

On other devices, kernel launches take most of the time, so each operation is one call for the whole list, and no value
is copied to the host.
"""
# ruff: noqa: SLF001 - torch documents its foreach operations under these names

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardscope.training import _compat

Tensors = list[Tensor] | tuple[Tensor, ...]

Number = TypeVar("Number", float, Tensor)
"""A value for one layer (a float), or the values for several layers (a vector)."""

Scalars = list[float] | Tensor
"""One number per layer: a list of floats on a CPU, a float64 vector on any other device."""


@dataclass(frozen=True, slots=True)
class AdamRun:
    """Tensors for one Adam step of several layers; those at the same index have the same shape, dtype and device.

    Attributes:
        weights: The weights.
        grads: The gradients.
        exp_avgs: First moments; updated in place.
        exp_avg_sqs: Second moments; updated in place.
        updates: Output: tensors from which Adam's update ``r`` (without learning rate and weight decay) is subtracted
            in place.
        steps: Step counts that already include this step, as 0-d float32 tensors on the host.
    """

    weights: Tensors
    grads: Tensors
    exp_avgs: Tensors
    exp_avg_sqs: Tensors
    updates: Tensors
    steps: Tensors


@dataclass(frozen=True, slots=True)
class AdamMoments:
    """Settings for updating Adam's two moments and combining them into the update ``r``.

    Attributes:
        betas: Decay rates of the first and the second moment.
        eps: Constant added to the square root of the second moment.
        bias_correction: Whether to correct the moments for their start at zero.
        grad_averaging: Whether the gradient enters the first moment with weight ``1 - beta1`` instead of 1.
    """

    betas: tuple[float, float]
    eps: float
    bias_correction: bool
    grad_averaging: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamMoments:
        """Return the settings of a parameter group."""
        return cls(group["betas"], group["eps"], group["bias_correction"], group["grad_averaging"])

    @property
    def fit_fused_kernel(self) -> bool:
        """Whether the fused AdamW kernel can be used; the kernel always averages gradients."""
        return self.grad_averaging and _compat.HAS_FUSED_ADAMW

    def counts(self, steps: Tensors) -> list[float]:
        """Return the step counts for the bias correction; without it, infinity, for which both corrections are 1."""
        return [float(step) for step in steps] if self.bias_correction else [math.inf] * len(steps)


def fused_moments_(run: AdamRun, moments: AdamMoments) -> None:
    """Update both moments, and subtract Adam's update ``r`` from ``run.updates``, in one pass over memory.

    The fused kernel computes ``w -= lr * r``; here ``run.updates`` takes the place of the weights, and lr is 1.
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
    """Do the same as `fused_moments_` without the fused kernel, for any device, dtype and settings."""
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
    """Write ``factor * tensors`` to `out`; a factor of 0 writes zeros, even where `tensors` are NaN or infinite."""
    if factor == 0:
        torch._foreach_zero_(out)
    elif tensors[0].is_cpu:
        for target, tensor in zip(out, tensors, strict=True):
            torch.mul(tensor, factor, out=target)
    else:
        torch._foreach_copy_(out, tensors)
        torch._foreach_mul_(out, factor)


def sums_of_squares(tensors: Tensors) -> Tensors:
    """Return the sum of squares of each tensor, as 0-d tensors in float32 or float64."""
    first = tensors[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    if first.is_cpu and first.dtype == wide and all(tensor.dim() == 1 for tensor in tensors):
        return [torch.dot(tensor, tensor) for tensor in tensors]
    norms = torch._foreach_norm(tensors, 2, dtype=wide)
    return torch._foreach_mul(norms, norms)


def add_scaled_(tensors: Tensors, directions: Tensors, factor: float, scales: Scalars) -> None:
    """Compute ``tensors += factor * scales * directions`` in place; `scales` has one number for each tensor."""
    if isinstance(scales, Tensor):
        factors = (factor * scales).to(tensors[0].dtype).unbind()
        torch._foreach_add_(tensors, torch._foreach_mul(directions, factors))
    else:
        rows = list(zip(tensors, directions, scales, strict=True))
        for tensor, direction, scale in reversed(rows):  # the last ones may still be in the cache
            tensor.add_(direction, alpha=factor * scale)


def at_most(number: Number, bound: float) -> Number:
    """Return the minimum of `number` and `bound`; NaN stays NaN."""
    return number.clamp(max=bound) if isinstance(number, Tensor) else min(number, bound)
