"""What is saved of an optimizer is complete, and making it so moves nothing."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.optimizers import build_optimizer
from shardscope.training.checkpoint import load_optimizer_state_of, optimizer_state_of


class HalfUsed(nn.Module):
    """Its first parameter takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.used = nn.Parameter(torch.ones(2, 3))

    def learn(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        self.used.square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw", "lamb", "lars"])
def test_a_parameter_without_gradient_is_saved_as_it_began_and_hinders_no_resume(name: str) -> None:
    models = [HalfUsed(), HalfUsed()]
    spec = ss.Optimizer(name, lr=0.1)
    whole, rest = [build_optimizer(spec, model.named_parameters()) for model in models]
    models[0].learn(whole)
    saved = optimizer_state_of(models[0], whole)
    assert torch.equal(models[0].unused, torch.ones(3))
    assert [group["lr"] for group in whole.param_groups] == [0.1] * len(whole.param_groups)
    assert saved.keys() == optimizer_state_of(models[1], rest).keys()
    assert not any(value.any() for key, value in saved.items() if key.startswith("state.unused."))
    models[1].load_state_dict(models[0].state_dict())
    load_optimizer_state_of(deepcopy(saved), models[1], rest)
    for model, optimizer in zip(models, (whole, rest), strict=True):
        model.learn(optimizer)
    assert torch.equal(models[0].used, models[1].used)
