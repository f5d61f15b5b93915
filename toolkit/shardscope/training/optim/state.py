"""Creates the optimizer state of all parameters, before it is saved or loaded."""

from __future__ import annotations

import torch

STEP = "step"
"""Key of the step count: the only entry of a parameter's optimizer state that is a single number."""


def fill_in_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the initial state of parameters that have none, by an optimizer step with a learning rate of 0.

    In a new optimizer, into which a checkpoint will be loaded, no parameter has any state; in a used one, parameters
    that the loss does not use have none. All ranks must call this, because the step may sum norms over ranks. Gradients
    are cleared afterwards.
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
