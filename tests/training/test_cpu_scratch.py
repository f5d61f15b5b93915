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


class Rows(nn.Module):
    """A block of ConvNeXt: channels of an image are normalized as the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, images: Tensor) -> Tensor:
        for _ in range(2):
            rows = self.norm(self.wide(images).permute(0, 2, 3, 1))
            images = images + self.down(nn.functional.gelu(self.up(rows))).permute(0, 3, 1, 2)
        return images


class Turned(nn.Module):
    """A convolution of rows of tokens, which have their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.Conv1d(16, 32, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.lines(rows.transpose(1, 2))


class Given(nn.Module):
    """A layer of which inputs are trained, as within a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(()))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows * self.scale)


IMAGES = torch.zeros(8, 16, 28, 28)
VOLUMES = torch.zeros(8, 16, 10, 10, 10)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "convolutions": (lambda: two(nn.Conv2d, 16, 32, 32, kernel_size=3, padding=1), (IMAGES,)),
    "strided": (lambda: two(nn.Conv2d, 16, 32, 32, kernel_size=3, stride=2), (IMAGES,)),
    "dilated": (lambda: two(nn.Conv2d, 16, 32, 32, kernel_size=3, dilation=2), (IMAGES,)),
    "of lines": (lambda: two(nn.Conv1d, 16, 32, 32, kernel_size=5), (torch.zeros(16, 16, 200),)),
    "of turned lines": (Turned, (torch.zeros(16, 200, 16),)),
    "of volumes": (lambda: two(nn.Conv3d, 16, 32, 32, kernel_size=3), (VOLUMES,)),
    "transposed": (lambda: two(nn.ConvTranspose2d, 16, 32, 16, kernel_size=3), (IMAGES,)),
    "few channels": (lambda: two(nn.Conv2d, 3, 24, 40, kernel_size=3), (torch.zeros(8, 3, 28, 28),)),
    "large groups": (
        lambda: two(nn.Conv2d, 32, 64, 32, kernel_size=3, groups=2),
        (torch.zeros(8, 32, 28, 28),),
    ),
    "small groups": (lambda: two(nn.Conv2d, 16, 32, 32, kernel_size=3, groups=4), (IMAGES,)),
    "depthwise": (lambda: two(nn.Conv2d, 16, 16, 16, kernel_size=3, groups=16), (IMAGES,)),
    "dilated depthwise": (
        lambda: two(nn.Conv2d, 16, 16, 16, kernel_size=3, dilation=2, groups=16),
        (IMAGES,),
    ),
    "channels last": (Rows, (IMAGES,)),
    "batch normalization": (lambda: Given(nn.BatchNorm2d(16)), (IMAGES,)),
    "upsampling": (lambda: Given(nn.Upsample(scale_factor=2)), (IMAGES,)),
    "bilinear upsampling": (lambda: Given(nn.Upsample(scale_factor=2, mode="bilinear")), (IMAGES,)),
    "patches": (lambda: Given(nn.Unfold(3)), (IMAGES,)),
    "bilinear": (lambda: nn.Bilinear(48, 64, 32), (torch.zeros(512, 48), torch.zeros(512, 64))),
    "attention": (Attention, (torch.zeros(2, 256, 64),)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_what_the_allocator_records(name: str, precision: str) -> None:
    make, inputs = CASES[name]
    assert peaks(make(), inputs, precision).ratio == pytest.approx(1, abs=0.02)
