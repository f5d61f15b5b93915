"""Precision recipes: what an overflow in fp16 leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.optimizers import build_optimizer
from shardscope.training.precision import Precision


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw", "lamb", "lars"])
def test_a_first_step_that_overflows_leaves_nothing_in_the_optimizer(name: str) -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer = build_optimizer(ss.Optimizer(name), [("weight", weight)])
    precision = Precision("fp16-mixed", torch.device("cpu"))
    scale = precision.loss_scale
    precision.scale(torch.zeros(1))
    weight.grad = torch.full_like(weight, float("inf"))
    assert precision.update(optimizer, [weight], None) == (None, True)
    assert precision.loss_scale == scale / 2
    assert torch.equal(weight, torch.ones(8, 8))
    assert not optimizer.state
