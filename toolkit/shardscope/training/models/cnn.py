"""A small convolutional network for image classification."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from shardscope.spec.models import CNNConfig
from shardscope.training.models._blocks import ImageClassifier


class CNN(ImageClassifier):
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
