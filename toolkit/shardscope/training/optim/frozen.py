"""AdamW and LAMB whose second moment stands still from some step on, for methods that exchange first moments.

Until `freeze` they are what they are otherwise, to the bit. From then on a step expects in each parameter's
gradient not a gradient but the new first moment, as the ranks have agreed on it:

    advance_(param, grad)      this rank's gradient becomes what it proposes as first moment
    ...                        the ranks agree on one
    step()                     takes it over and moves the weights

Both moments stay bias-corrected as they were (neither paper corrects them): the first goes on counting steps, the
second keeps the correction of its last one, so that a freeze changes no step's size.

Weights that hardly had a gradient before the freeze (a pixel that is seldom lit, a rare token) have a second moment
near zero, and once it can no longer grow, any later moment throws them far off, a coded one most of all. On digits (100
steps, 2 ranks, 3 seeds) such weights ran to 53, 65 and 610 under 1-bit Adam, against 1.1 uncompressed, and the last to
19 without any code. So a freeze lifts each second moment to a floor beside its layer's mean; the 610 are then 1.3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FLOOR = 0.1
"""Least root of a frozen second moment, relative to the root mean square of its layer's; 0 stays 0."""


class FrozenVariance(Optimizer):
    """What an optimizer with Adam's two moments needs to go on without its second."""

    frozen_after: int | None = None
    """The last step that has moved the second moment; None while it still moves."""

    @torch.no_grad()
    def freeze(self, after: int) -> None:
        """Leave the second moment as step `after` has left it, but for what `FLOOR` says.

        Every parameter has taken as many steps, or, where a run goes on from a checkpoint, more.
        """
        self.frozen_after = after
        for state in self.state.values():
            if float(state["step"]) == after:
                square = state["exp_avg_sq"]
                floor = FLOOR**2 * square.mean()
                torch.where(square > 0, square.clamp(min=floor), square, out=square)

    def advance_(self, param: nn.Parameter, grad: Tensor) -> None:
        """`grad`, of the parameter's shape, becomes the first moment that it leads to."""
        group = self._group_of(param)
        moment = self.first_moment(param).to(grad.device)
        grad.mul_(weight_of_gradient(group)).add_(moment, alpha=group["betas"][0])

    def first_moment(self, param: nn.Parameter) -> Tensor:
        """As the last step has left it, of the parameter's shape."""
        moment: Tensor = self.state[param]["exp_avg"]
        return moment

    def used(self, param: nn.Parameter) -> Tensor:
        """1 where there has ever been a gradient, else 0: there the weights have no reason to move."""
        square: Tensor = self.state[param]["exp_avg_sq"]
        return (square > 0).to(torch.float32)

    def _root(self, square: Tensor, group: dict[str, Any]) -> Tensor:
        assert self.frozen_after is not None
        return corrected_root(square, group, self.frozen_after)

    def _group_of(self, param: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(own is param for own in group["params"]))


def weight_of_gradient(group: dict[str, Any]) -> float:
    """With which a gradient enters the first moment."""
    return 1 - float(group["betas"][0]) if group.get("grad_averaging", True) else 1.0


def corrected_root(square: Tensor, group: dict[str, Any], steps: float) -> Tensor:
    """The root of a second moment after `steps` steps, plus eps."""
    correction = 1 - group["betas"][1] ** steps if group.get("bias_correction", True) else 1.0
    return square.sqrt().div_(math.sqrt(correction)).add_(group["eps"])


def first_correction(group: dict[str, Any], step: Tensor) -> Tensor:
    """What the first moment is divided by after `step` steps; the device is not waited for."""
    if not group.get("bias_correction", True):
        return torch.ones((), dtype=torch.float64, device=step.device)
    correction: Tensor = 1 - group["betas"][0] ** step.double()
    return correction
