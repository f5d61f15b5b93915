"""What an optimizer carries from step to step, complete before it is saved or loaded into."""

from __future__ import annotations

import torch

STEP = "step"
"""The one entry of a state that is a number for the whole tensor, under each of torch's optimizers and ours."""


def fill_in_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that have never been updated the state of their start, by a step that moves nothing.

    Those are all of a fresh optimizer, which a checkpoint is loaded into, and those that the loss does not use. Called
    by all ranks, for norms may be summed over them. Gradients are gone afterwards.
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
