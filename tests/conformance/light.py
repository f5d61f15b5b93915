"""A loss and a model for elastic runs, in a module that ranks import quickly."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, so late that a resize finds a step to follow."""
    time.sleep(0.04 if torch.is_grad_enabled() else 0.0)
    return nn.functional.cross_entropy(output, target)


def deep() -> nn.Sequential:
    """A model with layers for two stages on each of four ranks."""
    hidden = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *hidden, nn.Linear(32, 10))


def wide() -> nn.Sequential:
    """A model of 60 MB, which takes as long to save as it takes to start ranks."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200_000), nn.Tanh(), nn.Linear(200_000, 10))
