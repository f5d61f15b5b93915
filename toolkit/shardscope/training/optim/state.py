"""An optimizer's state, filled in completely before it is saved or loaded into."""

from __future__ import annotations

import torch

STEP = "step"
"""Key of the step count, the only state entry that is one number per tensor, in torch's optimizers and ours."""


def fill_in_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that have never been updated their initial state, by a step that moves nothing.

    These are all parameters of a new optimizer, which a checkpoint is loaded into, and those that the loss does not
    use. Called by all ranks, as norms may be summed over them. Gradients are cleared afterwards.
    """
    groups = optimizer.param_groups
    fresh = [p for group in groups for p in group["params"] if not optimizer.state.get(p)]
    rates = [group["lr"] for group in groups]
    optimizer.zero_grad(set_to_none=True)
    for group in groups:
        group["lr"] = 0.0
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for parameter in fresh:
        if STEP in optimizer.state.get(parameter, {}):
            optimizer.state[parameter][STEP].zero_()
    optimizer.zero_grad(set_to_none=True)
