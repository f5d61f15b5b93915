"""Peaks of steps with kernels that take memory beside their results, as torch's allocator records them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from conformance.allocator import peaks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(64, 192)

    def forward(self, rows: Tensor) -> Tensor:
        parts = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in self.projection(rows).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(*parts, is_causal=True)


def two(layer: Callable[..., nn.Module], *widths: int, **fields: object) -> nn.Module:
    return nn.Sequential(*(layer(*pair, **fields) for pair in pairwise(widths)))


IMAGES = torch.zeros(8, 16, 28, 28)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "convolutions": (lambda: two(nn.Conv2d, 16, 32, 32, kernel_size=3, padding=1), (IMAGES,)),
    "dilated": (lambda: two(nn.Conv2d, 16, 32, 32, kernel_size=3, dilation=2), (IMAGES,)),
    "of lines": (lambda: two(nn.Conv1d, 16, 32, 32, kernel_size=5), (torch.zeros(16, 16, 200),)),
    "transposed": (lambda: two(nn.ConvTranspose2d, 16, 32, 16, kernel_size=3), (IMAGES,)),
    "few channels": (lambda: two(nn.Conv2d, 3, 24, 40, kernel_size=3), (torch.zeros(8, 3, 28, 28),)),
    "bilinear": (lambda: nn.Bilinear(48, 64, 32), (torch.zeros(512, 48), torch.zeros(512, 64))),
    "attention": (Attention, (torch.zeros(2, 256, 64),)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_what_the_allocator_records(name: str, precision: str) -> None:
    make, inputs = CASES[name]
    assert peaks(make(), inputs, precision).ratio == pytest.approx(1, abs=0.02)
