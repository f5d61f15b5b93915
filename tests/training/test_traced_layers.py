"""Layers of a pipeline that run different operations are traced each, and those that run the same ones once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from shardscope.methods.strategies.pipeline._torch_probe import probe
from shardscope.prediction.traced import traced
from shardscope.spec.model.step import PipelinePiece
from shardscope.spec.models import GPTConfig
from shardscope.training import step_trace
from shardscope.training.equal_layers import LayerCall
from shardscope.training.models import build_model
from shardscope.training.models.in_order import layers_in_order
from shardscope.training.recompute import apply_recompute


def expanded(x: Tensor, times: int) -> Tensor:
    """Return a function of x that saves `times` as many numbers."""
    return x.repeat(1, times).square().view(len(x), times, -1).mean(1)


def small(x: Tensor) -> Tensor:
    return expanded(x, 1)


def large(x: Tensor) -> Tensor:
    return expanded(x, 16)


@dataclass(frozen=True)
class Setting:
    times: int


class Block(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.how(x))  # type: ignore[no-any-return]


class Other(Block):
    """The same layer of another class, which is never equal to a `Block`."""


def pieces(*layers: Callable[[], nn.Module]) -> tuple[PipelinePiece, ...]:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), *(make() for make in layers), nn.Linear(64, 10))

    step = traced(ss.Job(model=model, data="digits", batch=ss.Batch(8))).table.step
    assert step is not None
    return step.pieces


def test_layers_with_different_functions_are_both_traced() -> None:
    expected = pieces(lambda: Other(small), lambda: Block(large))
    assert expected[2].split != expected[3].split
    assert pieces(lambda: Block(small), lambda: Block(large)) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (small, large),
        (partial(expanded, times=1), partial(expanded, times=9)),
        (lambda x: expanded(x, 1), lambda x: expanded(x, 9)),
        ((1,), (9,)),
        ([1], [9]),
        (Setting(1), Setting(9)),
        (1, True),
    ],
    ids=["functions", "partials", "lambdas", "tuples", "lists", "settings", "types"],
)
def test_all_attributes_are_compared(one: Any, other: Any) -> None:
    x = torch.ones(2, 64)
    assert LayerCall(Block(one), x).equals(LayerCall(Block(one), x))
    assert not LayerCall(Block(one), x).equals(LayerCall(Block(other), x))


def test_equal_layers_are_traced_once_even_if_they_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, split_passes = list[nn.Module](), step_trace.split_passes

    def counted(layer: nn.Module, *args: Any) -> Any:
        calls.append(layer)
        return split_passes(layer, *args)

    monkeypatch.setattr(step_trace, "split_passes", counted)
    config = GPTConfig(layers=4, hidden=16, heads=2, vocab=256, seq=16, ffn=32)
    traced(
        ss.Job(model=lambda: build_model(config), data="python-source", recompute="full", batch=ss.Batch(4))
    )
    assert len(calls) == 2 * len(["embedding", "block", "head"])  # in two modes


def test_a_layer_may_change_its_input_in_place() -> None:
    plain, in_place = pieces(nn.ReLU)[2], pieces(partial(nn.ReLU, inplace=True))[2]
    assert plain.stored_bytes == 2 * 64 * 4
    assert in_place.stored_bytes == 64 * 4  # the input and the result are one
    assert in_place.output_bytes == plain.output_bytes
    assert in_place.split.keys() == plain.split.keys()


class Pair(nn.Module):
    """A linear layer whose output and input are a tuple or a mapping."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Any:
        return (
            self.kind(zip("ab", (self.linear(x), x), strict=True))
            if self.kind is dict
            else (self.linear(x), x)
        )


class Sum(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        one, other = pair.values() if isinstance(pair, dict) else pair
        return one + other  # type: ignore[no-any-return]


class Called(nn.Module):
    """A model that is called as a whole, as its layers cannot be told apart."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [tuple, dict])
@pytest.mark.parametrize("strategy", ["single", "ring", "zero-3"])
def test_layers_that_hand_on_a_tuple_or_a_mapping_are_predicted_together(kind: type, strategy: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), Pair(kind), Sum(), nn.Linear(64, 10))

    job = ss.Job(model=model, data="digits", strategy=strategy, world_size=2 - (strategy == "single"))
    found, whole = (ss.predict(each) for each in (job, job.replace(model=lambda: Called(model()))))
    assert found.step.trace.pieces == ()
    assert found.peak_bytes == whole.peak_bytes > 0
    with pytest.raises(
        ss.SpecError, match=f"'1' returns a {kind.__name__}, but a pipeline can only send a float"
    ):
        probe(model(), layers_in_order(model()), torch.ones(8, 64), nullcontext, measure=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.register_forward_hook(lambda *_: None),
        lambda block: block.linear.weight.register_hook(lambda gradient: gradient),
        lambda block: block.linear.weight.requires_grad_(False),
        lambda block: setattr(block.linear.weight, "data", block.linear.weight.data.t()),
        lambda block: block.double(),
        lambda block: setattr(block, "how", torch.ones(2)),
        lambda block: setattr(block, "extra", nn.Parameter(torch.ones(1))),
        lambda block: setattr(block.linear, "forward", torch.sin),
        lambda block: block.linear.eval(),
    ],
    ids=["hook", "tensor-hook", "frozen", "strides", "type", "tensor", "parameter", "forward", "evaluates"],
)
def test_a_layer_that_differs_in_one_thing_is_not_equal(change: Callable[[Block], object]) -> None:
    plain, changed, x = Block((1,)), Block((1,)), torch.ones(2, 64)
    assert LayerCall(plain, x).equals(LayerCall(changed, x))
    change(changed)
    assert not LayerCall(plain, x).equals(LayerCall(changed, x))


def test_arguments_are_compared_too() -> None:
    layer, x = Block((1,)), torch.ones(2, 64)
    for other in (torch.ones(3, 64), x.clone().requires_grad_(), (x,), x.expand(2, 64).t(), [x, True]):
        assert not LayerCall(layer, x).equals(LayerCall(layer, other))
    assert not LayerCall(layer, [x, False]).equals(LayerCall(layer, [x, True]))


def test_recomputed_modules_of_one_class_have_one_class() -> None:
    model = apply_recompute(nn.Sequential(*(nn.Sequential(Block((1,)), nn.ReLU()) for _ in range(3))), "full")
    first, second, *_ = model
    assert type(first) is type(second) is not nn.Sequential
    assert isinstance(first, nn.Sequential)
    assert type(copy.deepcopy(first)) is type(first)
    selective = apply_recompute(
        nn.Sequential(*(nn.Sequential(Block((1,)), nn.ReLU()) for _ in range(3))), "selective"
    )
    assert type(selective[0]) is not type(first)
