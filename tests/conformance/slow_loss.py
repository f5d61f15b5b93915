"""A loss that takes its time, in a module that ranks import quickly."""

from __future__ import annotations

import time

import torch
from torch import Tensor


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, so late that a resize finds a step to follow."""
    time.sleep(0.04 if torch.is_grad_enabled() else 0.0)
    return torch.nn.functional.cross_entropy(output, target)
