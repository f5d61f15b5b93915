"""Recomputation in a backward pass that is split into a pass for inputs and a pass for weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from shardscope.training._compat_pipelining import (
    one_pass_for_weights,
    stage_backward_input,
    stage_backward_weight,
)
from shardscope.training.recompute import apply_recompute
from shardscope.training.split_trace import split_passes

WIDTH = 16


class Counted(nn.Module):
    """Three weights with their biases, in a block that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).requires_grad_()


def gradients(stage: nn.Module, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(parameter.grad for parameter in stage.parameters())]
    return [each for each in found if each is not None]


def test_each_pass_of_a_split_backward_pass_recomputes_a_layer_once() -> None:
    plain, stage = Stage(), apply_recompute(Stage(), "full")
    expected, x = inputs(), inputs()
    plain(expected).sum().backward()
    output = stage(x)
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
    assert [layer.runs for layer in stage.layers] == [2, 2, 2]
    with one_pass_for_weights(stage, groups) as ordered:
        stage_backward_weight(stage.parameters(), ordered)
    assert [layer.runs for layer in stage.layers] == [3, 3, 3]
    ours, theirs = gradients(stage, x), gradients(plain, expected)
    assert len(ours) == len(theirs) == 1 + 3 * 6
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_pass_for_weights_frees_each_layer_before_it_recomputes_an_earlier_one() -> None:
    grown = []
    for count in (1, 3):
        stage = apply_recompute(Stage(), "full")
        del stage.layers[count:]
        x = inputs()
        found = split_passes(stage, partial(stage, x), [x], len(x))
        assert found is not None
        assert found.memory.in_reverse
        grown.append(found.grown[2])
    assert grown[0] == grown[1] > 0
