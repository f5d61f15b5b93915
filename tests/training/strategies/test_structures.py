"""Inputs, outputs and targets in structures, under every strategy, against a plain loop."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardscope as ss
from conformance.ranks import RankPool
from conformance.users import Case, follow, plain

ROWS, CLASSES, WIDTH = 60, 3, 8
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
STRATEGIES = ["all-reduce", "ring", "tree", "parameter-server", "zero-1", "zero-2", "zero-3"]


class Output(OrderedDict[str, Any]):
    """As of Hugging Face: a mapping whose values are attributes too, which torch's pytrees do not know."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Classifier(nn.Module):
    """Called with keywords only; computes its own loss where it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        x = (self.words(input_ids) * attention_mask[..., None]).sum(dim=1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        logits = self.head(x)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits)


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(11, (ROWS, 5), generator=generator())
    mask = torch.rand(ROWS, 5, generator=generator()) > 0.2
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.sum(dim=1) % CLASSES}


def unlabelled() -> tuple[dict[str, Tensor], Tensor]:
    rows = tokens()
    labels = rows.pop("labels")
    return rows, labels


class Two(nn.Module):
    """Two arguments and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, WIDTH), nn.Linear(2, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)])

    def forward(self, left: Tensor, right: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        x = torch.relu(self.left(left) + self.right(right["deep"]))
        return self.heads[0](x), {"value": self.heads[1](x)}


def two_of_each() -> Any:
    left = torch.randn(ROWS, 4, generator=generator())
    right = torch.randn(ROWS, 2, generator=generator())
    return (left, {"deep": right}), {
        "class": (left.sum(dim=1) > 0).long(),
        "value": right.sum(dim=1, keepdim=True),
    }


def two_losses(output: Any, target: Any) -> Tensor:
    scores, values = output
    return functional.cross_entropy(scores, target["class"]) + functional.mse_loss(
        values["value"], target["value"]
    )


CASES = {
    "own loss": (Case(Classifier, tokens), lambda output, _: output.loss),
    "logits": (Case(Classifier, unlabelled), lambda output, y: functional.cross_entropy(output.logits, y)),
    "two of each": (Case(Two, two_of_each, two_losses), two_losses),
}


@cache
def expected(name: str) -> Any:
    return plain(*CASES[name])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_structures_train_as_in_a_plain_loop(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    """All of them on two ranks, and one on three and on four."""
    names = (
        list(CASES)
        if pool.world_size == 2
        else [list(CASES)[(STRATEGIES.index(strategy) + pool.world_size) % 3]]
    )
    for name in names:
        case, _ = CASES[name]
        evaluations = follow(pool, tmp_path, case, strategy, expected(name))
        assert all((found["accuracy"] is None) == (name == "two of each") for found in evaluations)


class Cut(Two):
    """`Two` as layers: the first takes both arguments, the last returns both results."""

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        middle = [(f"middle.{index}", layer) for index, layer in enumerate(self.middle)]
        return [("first", self.first), *middle, ("last", self.last)]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Joined(self.left, self.right), Forked(self.heads)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, left: Tensor, right: dict[str, Tensor]) -> Any:
        x = self.first(left, right)
        for layer in self.middle:
            x = layer(x)
        return self.last(x)


class Joined(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, left: Tensor, right: dict[str, Tensor]) -> Tensor:
        return torch.relu(self.left(left) + self.right(right["deep"]))


class Forked(nn.Module):
    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Any:
        return self.heads[0](x), {"value": self.heads[1](x)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_takes_several_inputs_and_gives_several_outputs(
    pool: RankPool, tmp_path: Path, schedule: str
) -> None:
    case = Case(Cut, two_of_each, two_losses)
    split = ["even", "time", "memory"][(SCHEDULES.index(schedule) + pool.world_size) % 3]
    follow(pool, tmp_path, case, ss.Pipeline(schedule=schedule, split=split), plain(case, two_losses))
