"""A residual network for small images, with group norm, so that ranks need not exchange batch statistics."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from shardscope.spec.models import ResNetConfig
from shardscope.training.models._blocks import ForwardPart, ImageClassifier


class ResNet(ImageClassifier):
    """Residual network from images `(N, C, H, W)` to class logits `(N, classes)`."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = _conv_norm(config.in_channels, config.width, groups=config.groups)
        widths = (config.width, *config.channels)
        self.blocks = nn.ModuleList(
            BasicBlock(inputs, outputs, groups=config.groups) for inputs, outputs in pairwise(widths)
        )
        self.head = nn.Linear(config.channels[-1], config.classes)

    def embed(self, images: Tensor) -> Tensor:
        """Return the features `(N, width, H, W)` of the first convolution."""
        features: Tensor = self.stem(images).relu()
        return features

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Return the stem, the blocks and the head as named layers, in order, for a pipeline."""
        return [("stem", ForwardPart(self.embed, self.stem)), *super().pipeline_layers()]


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions; if it changes the number of channels, it halves height and width."""

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
        """Return features `(N, outputs, H / stride, W / stride)`, with a stride of 1 or 2."""
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
