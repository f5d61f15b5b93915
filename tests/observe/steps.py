"""Training steps as a user writes them, for tests that watch them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def train(
    model: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, steps: int = 3
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(6, 5)).square().mean().backward()
        optimizer.step()
