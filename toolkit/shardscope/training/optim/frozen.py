"""AdamW and LAMB with a second moment that is frozen after some step, for methods that exchange first moments.

Until `freeze` they are bit-identical to the plain optimizers. From then on, a step expects the new first moment,
on which the ranks have agreed, in each parameter's gradient:

    advance_(param, grad)      turns this rank's gradient into its proposal for the first moment
    ...                        the ranks agree on one
    step()                     stores it and moves the weights

Both moments stay bias-corrected as before (neither paper corrects them). The first continues to count steps, and the
second keeps the correction of its last step, so that a freeze does not change the size of a step.

Weights that hardly had a gradient before the freeze (a pixel that is seldom lit, a rare token) have a second moment
near zero. After it can no longer grow, any later first moment moves them far off, most of all a compressed one. On
digits (100 steps, 2 ranks, 3 seeds) the largest of these weights grew to 53, 65 and 610 under 1-bit Adam, against 1.1
uncompressed, and the last to 19 without any coding. So a freeze raises each second moment to a floor relative to its
layer's mean, which reduces the 610 to 1.3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FLOOR = 0.1
"""Minimum root of a frozen second moment, relative to the root of the layer's mean second moment; 0 stays 0."""


class FrozenVariance(Optimizer):
    """Base of optimizers with Adam's two moments that can freeze the second."""

    frozen_after: int | None = None
    """The last step that updated the second moment; None while it is not frozen."""

    @torch.no_grad()
    def freeze(self, after: int) -> None:
        """Freeze the second moment as step `after` left it, except for the floor of `FLOOR`.

        Every parameter has taken `after` steps, or more if the run was resumed from a checkpoint.
        """
        self.frozen_after = after
        for state in self.state.values():
            if float(state["step"]) == after:
                square = state["exp_avg_sq"]
                floor = FLOOR**2 * square.mean()
                torch.where(square > 0, square.clamp(min=floor), square, out=square)

    def advance_(self, param: nn.Parameter, grad: Tensor) -> None:
        """Replace `grad`, of the parameter's shape, by the first moment that it leads to."""
        group = self._group_of(param)
        moment = self.first_moment(param).to(grad.device)
        grad.mul_(weight_of_gradient(group)).add_(moment, alpha=group["betas"][0])

    def first_moment(self, param: nn.Parameter) -> Tensor:
        """First moment after the last step, of the parameter's shape."""
        moment: Tensor = self.state[param]["exp_avg"]
        return moment

    def used(self, param: nn.Parameter) -> Tensor:
        """Mask of elements: 1 where the gradient has ever been non-zero, else 0. Elements at 0 need no update."""
        square: Tensor = self.state[param]["exp_avg_sq"]
        return (square > 0).to(torch.float32)

    def _root(self, square: Tensor, group: dict[str, Any]) -> Tensor:
        assert self.frozen_after is not None
        return corrected_root(square, group, self.frozen_after)

    def _group_of(self, param: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(own is param for own in group["params"]))


def weight_of_gradient(group: dict[str, Any]) -> float:
    """Weight of a gradient in the first moment."""
    return 1 - float(group["betas"][0]) if group.get("grad_averaging", True) else 1.0


def corrected_root(square: Tensor, group: dict[str, Any], steps: float) -> Tensor:
    """Root of the bias-corrected second moment after `steps` steps, plus eps."""
    correction = 1 - group["betas"][1] ** steps if group.get("bias_correction", True) else 1.0
    return square.sqrt().div_(math.sqrt(correction)).add_(group["eps"])


def first_correction(group: dict[str, Any], step: Tensor) -> Tensor:
    """Bias-correction divisor of the first moment after `step` steps; does not wait for the device."""
    if not group.get("bias_correction", True):
        return torch.ones((), dtype=torch.float64, device=step.device)
    correction: Tensor = 1 - group["betas"][0] ** step.double()
    return correction
