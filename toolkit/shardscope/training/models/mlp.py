"""A plain multilayer perceptron on flattened images."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from shardscope.spec.models import MLPConfig


class MLP(nn.Module):
    """Images `(N, C, H, W)`, or rows `(N, inputs)`, to class scores `(N, classes)`."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        widths = [config.inputs] + [config.hidden] * config.layers
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.GELU())
            for inputs, outputs in pairwise(widths)
        )
        self.head = nn.Linear(config.hidden, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores `(N, classes)`."""
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores
