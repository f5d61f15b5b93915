"""Parameters and gradients that the optimizer tests share: odd shapes, zeros, and gradients that vanish."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

SHAPES = ((), (1,), (7,), (3, 5), (2, 3, 4), (4, 1, 3, 3), (300, 41))
STEPS = 50


def parameters(dtype: torch.dtype, shapes=SHAPES, seed: int = 0) -> list[nn.Parameter]:
    """One parameter a shape; the last is followed by one initialised to zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors.append(torch.zeros(4, 3, dtype=torch.float64))
    return [nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def gradients(params: list[nn.Parameter], steps: int = STEPS, seed: int = 1) -> Iterator[list[Tensor]]:
    """Random gradients a step, of changing size; those of the third parameter are zero throughout."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        grads = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params]
        grads[2].zero_()
        yield [(0.1 * (1 + step % 7) * grad).to(p.dtype) for p, grad in zip(params, grads, strict=True)]


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = STEPS) -> list[Tensor]:
    """The weights after the steps."""
    for grads in gradients(params, steps):
        step(optimizer, params, grads)
    return [param.detach().clone() for param in params]


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


def worst_difference(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference of any tensor, relative to the tensor's own norm."""
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in zip(left, right, strict=True)
    )
