"""Base class of AdamW and LAMB variants whose second moment can be frozen, for 1-bit Adam and 1-bit LAMB.

Until `freeze` is called, the optimizers are bitwise identical to AdamW and LAMB. After that, the ranks exchange first
moments instead of gradients, and a step expects the averaged first moment in each parameter's `grad`:

    advance_(param, grad)      replaces this rank's gradient with this rank's new first moment
    ...                        the ranks average the first moments, and store the mean in param.grad
    step()                     takes the mean as the first moment, and updates the weights

Both moments keep their bias correction, although the papers on 1-bit Adam and 1-bit LAMB use none. The correction of
the first moment continues with the step count. The correction of the second moment stays as it was at the freeze, so
that freezing does not change the size of a step.

Weights that received almost no gradient before the freeze (such as those of a pixel that is rarely set, or of a rare
token) have a second moment near zero, and their updates are divided by its square root. So after the freeze, even a
small first moment changes them by far too much, especially if it is compressed. An example on the digits data (100
steps, 2 ranks): with three different seeds, the largest of these weights grew to 53, 65 and 610 under 1-bit Adam, but
only to 1.1 under AdamW without compression. With the third seed, it grew to 19 with a frozen second moment but
uncompressed first moments. `freeze` therefore raises each second moment to a minimum relative to the layer's mean. With
the third seed, the largest weight is then 1.3 instead of 610.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FLOOR = 0.1
"""Minimum square root of a frozen second moment, relative to the square root of the layer's mean second moment; second
moments of 0 stay 0."""


class FrozenVariance(Optimizer):
    """Base class of optimizers that have Adam's two moments and can freeze the second."""

    frozen_after: int | None = None
    """The last step that updated the second moment; None if it is not frozen."""

    @torch.no_grad()
    def freeze(self, after: int) -> None:
        """Freeze the second moment at its value after step `after`, raised to the minimum that `FLOOR` sets.

        In a run resumed after the freeze, parameters have taken more than `after` steps; their second moments already
        have this minimum, and are left unchanged.
        """
        self.frozen_after = after
        for state in self.state.values():
            if float(state["step"]) == after:
                square = state["exp_avg_sq"]
                floor = FLOOR**2 * square.mean()
                torch.where(square > 0, square.clamp(min=floor), square, out=square)

    def advance_(self, param: nn.Parameter, grad: Tensor) -> None:
        """Replace `grad`, a gradient of the parameter, with the first moment after a step with this gradient."""
        group = self._group_of(param)
        moment = self.first_moment(param).to(grad.device)
        grad.mul_(weight_of_gradient(group)).add_(moment, alpha=group["betas"][0])

    def first_moment(self, param: nn.Parameter) -> Tensor:
        """Return the first moment after the last step, with the parameter's shape."""
        moment: Tensor = self.state[param]["exp_avg"]
        return moment

    def used(self, param: nn.Parameter) -> Tensor:
        """Return a float32 mask of the parameter: 1 for elements whose second moment is non-zero, else 0.

        Where the second moment is zero, all gradients before the freeze were zero, and no update is needed.
        """
        square: Tensor = self.state[param]["exp_avg_sq"]
        return (square > 0).to(torch.float32)

    def _root(self, square: Tensor, group: dict[str, Any]) -> Tensor:
        assert self.frozen_after is not None
        return corrected_root(square, group, self.frozen_after)

    def _group_of(self, param: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(own is param for own in group["params"]))


def weight_of_gradient(group: dict[str, Any]) -> float:
    """Return the weight of a new gradient in the first moment."""
    return 1 - float(group["betas"][0]) if group.get("grad_averaging", True) else 1.0


def corrected_root(square: Tensor, group: dict[str, Any], steps: float) -> Tensor:
    """Return the square root of the second moment `square`, bias-corrected for `steps` steps, plus eps."""
    correction = 1 - group["betas"][1] ** steps if group.get("bias_correction", True) else 1.0
    return square.sqrt().div_(math.sqrt(correction)).add_(group["eps"])


def first_correction(group: dict[str, Any], step: Tensor) -> Tensor:
    """Return the bias-correction divisor of the first moment after `step` steps; does not wait for the device."""
    if not group.get("bias_correction", True):
        return torch.ones((), dtype=torch.float64, device=step.device)
    correction: Tensor = 1 - group["betas"][0] ** step.double()
    return correction
