"""A model whose layers are called in order computes what the model does, whatever the structure of its inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardscope.training.data.batches import call
from shardscope.training.models.in_order import InOrder


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(8, 4), nn.Embedding(2, 4)

    def forward(self, words: Tensor, kinds: Tensor) -> Tensor:
        return self.words(words) + self.kinds(kinds)


class OfTwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = Sum(), nn.Linear(4, 8)

    def forward(self, words: Tensor, kinds: Tensor) -> Tensor:
        return self.head(self.first(words, kinds))

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("head", self.head)]


@pytest.mark.parametrize("as_inputs", [lambda **named: tuple(named.values()), dict])
def test_the_first_layer_takes_all_inputs(as_inputs: Any) -> None:
    model = OfTwoInputs()
    inputs = as_inputs(words=torch.arange(8), kinds=torch.arange(8) % 2)
    assert torch.equal(call(InOrder(model), inputs), call(model, inputs))
