"""What is saved of an optimizer is complete, and making it so moves nothing."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.optimizers import build_optimizer
from shardscope.training.optim.state import NamedOptimizer


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


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> NamedOptimizer:
    return NamedOptimizer(optimizer, {p: name for name, p in model.named_parameters()})


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw", "lamb", "lars"])
def test_a_parameter_without_gradient_has_no_state_and_hinders_no_resume(name: str) -> None:
    models = [HalfUsed(), HalfUsed()]
    spec = ss.Optimizer(name, lr=0.1)
    whole, rest = [build_optimizer(spec, model.named_parameters()) for model in models]
    models[0].learn(whole)
    saved = named(models[0], whole).sections()
    assert torch.equal(models[0].unused, torch.ones(3))
    assert not any("unused" in section for section in saved)
    models[1].load_state_dict(models[0].state_dict())
    named(models[1], rest).load(deepcopy(saved))
    for model, optimizer in zip(models, (whole, rest), strict=True):
        model.learn(optimizer)
    assert torch.equal(models[0].used, models[1].used)
