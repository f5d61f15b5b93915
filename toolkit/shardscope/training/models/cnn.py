"""A small convolutional network for image classification."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from shardscope.spec.models import CNNConfig
from shardscope.training.models._blocks import ForwardPart


class CNN(nn.Module):
    """Convolutional network from images `(N, C, H, W)` to class logits `(N, classes)`."""

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
        """Return the class logits `(N, classes)` for images `(N, C, H, W)`."""
        x = images
        for block in self.blocks:
            x = block(x)
        return self.score(x)

    def score(self, x: Tensor) -> Tensor:
        """Return the class logits `(N, classes)` for the features `(N, C, H, W)` of the last block."""
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks and the head as named layers, in order, for a pipeline."""
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [*blocks, ("head", ForwardPart(self.score, self.head))]
