"""What tests of memory share: small models with a batch each, and a step taken by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardscope.training.loss import cross_entropy
from shardscope.training.models import build_model
from shardscope.training.recompute import apply_recompute

MODELS = ["mlp", "cnn", "gpt-nano"]


def make(name: str, recompute: str = "none") -> nn.Module:
    """A model of the catalogue, always with the same weights."""
    torch.manual_seed(0)
    return apply_recompute(build_model(name), recompute)  # type: ignore[arg-type]


def batch(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each with memory of its own."""
    generator = torch.Generator().manual_seed(1)
    if name == "gpt-nano":
        tokens = torch.randint(256, (8, 65), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.rand(32, 1, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: tuple[Tensor, Tensor],
    after_forward: Callable[[], None] = lambda: None,
) -> None:
    """One training step, written by hand."""
    optimizer.zero_grad(set_to_none=True)
    loss = cross_entropy(model(rows[0]), rows[1])
    after_forward()
    loss.backward()
    optimizer.step()
