"""A small convolutional network."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from shardscope.spec.models import CNNConfig
from shardscope.training.models._blocks import ForwardPart


class CNN(nn.Module):
    """Images `(N, C, H, W)` to class scores `(N, classes)`."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        widths = (config.in_channels, *config.channels)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
                nn.GroupNorm(config.groups, outputs),
                nn.ReLU(),
                nn.MaxPool2d(2, ceil_mode=True),
            )
            for inputs, outputs in pairwise(widths)
        )
        self.head = nn.Linear(config.channels[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores `(N, classes)`."""
        x = images
        for block in self.blocks:
            x = block(x)
        return self.score(x)

    def score(self, x: Tensor) -> Tensor:
        """Features `(N, C, H, W)` to class scores `(N, classes)`."""
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Blocks and head, in order."""
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [*blocks, ("head", ForwardPart(self.score, self.head))]
