"""Reading rows before training leaves the random numbers of a data set's own generators as they were."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from conformance import counted
from conformance.alone import trainer_in

GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand(1, generator=g))),
    "python": (lambda: random.Random(1), lambda g: g.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda g: float(g.random())),
    "numpy legacy": (lambda: np.random.RandomState(1), lambda g: float(g.rand())),
}


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, generator: Any, draw: Any) -> None:
        self.transforms, self.draw = [{"noise": generator}], draw
        self.x, self.y = counted.classes()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.draw(self.transforms[0]["noise"]), self.y[index]


@pytest.mark.parametrize("kind", GENERATORS)
def test_trying_the_loss_draws_nothing(kind: str, tmp_path: Path) -> None:
    make, draw = GENERATORS[kind]
    generator = make()
    trainer_in(tmp_path, model=counted.mlp, data=lambda: Noisy(generator, draw), batch=12)
    assert draw(generator) == draw(make())
