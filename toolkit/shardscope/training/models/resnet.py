"""The residual network for small images, with group norm so that ranks need not share statistics."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from shardscope.spec.models import ResNetConfig
from shardscope.training.models._blocks import ForwardPart


class ResNet(nn.Module):
    """Images `(N, C, H, W)` to class scores `(N, classes)`."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = _conv_norm(config.in_channels, config.width, groups=config.groups)
        widths = (config.width, *config.channels)
        self.blocks = nn.ModuleList(
            BasicBlock(inputs, outputs, groups=config.groups) for inputs, outputs in pairwise(widths)
        )
        self.head = nn.Linear(config.channels[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores `(N, classes)`."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.score(x)

    def embed(self, images: Tensor) -> Tensor:
        """Features `(N, width, H, W)`."""
        features: Tensor = self.stem(images).relu()
        return features

    def score(self, x: Tensor) -> Tensor:
        """Features `(N, C, H, W)` to class scores `(N, classes)`."""
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Stem, blocks and head, in order."""
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [
            ("stem", ForwardPart(self.embed, self.stem)),
            *blocks,
            ("head", ForwardPart(self.score, self.head)),
        ]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut; halves the image where it changes the number of channels."""

    def __init__(self, inputs: int, outputs: int, *, groups: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = _conv_norm(inputs, outputs, groups=groups, stride=stride)
        self.second = _conv_norm(outputs, outputs, groups=groups)
        self.shortcut = (
            nn.Identity()
            if inputs == outputs
            else _conv_norm(inputs, outputs, groups=groups, stride=stride, kernel_size=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features `(N, outputs, H / stride, W / stride)`."""
        residual: Tensor = self.second(self.first(x).relu())
        shortcut: Tensor = self.shortcut(x)
        return (residual + shortcut).relu()


def _conv_norm(
    inputs: int, outputs: int, *, groups: int, stride: int = 1, kernel_size: int = 3
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size, stride=stride, padding=kernel_size // 2, bias=False),
        nn.GroupNorm(groups, outputs),
    )
