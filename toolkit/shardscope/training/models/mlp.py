"""A multilayer perceptron on flattened images."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from shardscope.spec.models import MLPConfig
from shardscope.training.models._blocks import ForwardPart


class MLP(nn.Module):
    """Multilayer perceptron from images `(N, C, H, W)`, or vectors `(N, inputs)`, to class logits `(N, classes)`."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        widths = [config.inputs] + [config.hidden] * config.layers
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.GELU())
            for inputs, outputs in pairwise(widths)
        )
        self.head = nn.Linear(config.hidden, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class logits `(N, classes)`."""
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Return the hidden layers and the head as named layers, in order, for a pipeline."""
        first = ForwardPart(lambda images: self.blocks[0](images.flatten(1)), self.blocks[0])
        rest = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)][1:]
        return [("blocks.0", first), *rest, ("head", self.head)]
