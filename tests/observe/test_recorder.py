"""Which forward passes count in a step: those that a backward pass follows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardscope as ss

Loss = Callable[[nn.Module], Tensor]


class Net(nn.Module):
    """Two layers, the first one recomputed on request; refuses batches of one sample."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.recomputes = nn.Linear(5, 9), nn.Linear(9, 2), recomputes

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1:
            raise ValueError("one sample only")
        hidden = (
            checkpoint(self.first, inputs, use_reentrant=False) if self.recomputes else self.first(inputs)
        )
        return self.second(hidden.tanh())


@dataclass
class Output:
    """An output that is not a tensor."""

    logits: Tensor


class Wrapped(Net):
    """Returns an object of its own class."""

    def forward(self, inputs: Tensor) -> Any:
        return Output(super().forward(inputs))


def loss(model: nn.Module, samples: int = 2) -> Tensor:
    output = model(torch.ones(samples, 5))
    return (output.logits if isinstance(output, Output) else output).square().mean()


def observed(folder: Path, model: nn.Module, step: Callable[[], None]) -> list[tuple[int, int, int]]:
    """Samples of each of two steps, with its forward spans and the passes of the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ss.observe(model, optimizer, root=folder) as run:
        for _ in range(2):
            step()
            optimizer.step()
            optimizer.zero_grad()
    assert run.reason is None
    spans = run.timeline().query("name == 'forward'").groupby("step").size()
    steps = run.events("step")
    return [
        (event["samples"], int(spans.get(event["step"], 0)), run.job.num_micro_batches) for event in steps
    ]


@pytest.mark.parametrize("kind", [Net, Wrapped])
def test_an_evaluation_with_gradients_does_not_count(tmp_path: Path, kind: type[Net]) -> None:
    model = kind()

    def step() -> None:
        model.eval()
        loss(model, 7)
        model.train()
        loss(model).backward()
        loss(model, 7)

    assert observed(tmp_path, model, step) == [(2, 1, 1), (2, 1, 1)]


def test_a_pass_that_raises_does_not_count(tmp_path: Path) -> None:
    model = Net()

    def step() -> None:
        with suppress(ValueError):
            loss(model, 1)
        loss(model).backward()

    assert observed(tmp_path, model, step) == [(2, 1, 1), (2, 1, 1)]


def test_accumulated_passes_count(tmp_path: Path) -> None:
    model = Net()

    def step() -> None:
        for _ in range(3):
            loss(model).backward()

    assert observed(tmp_path, model, step) == [(6, 3, 3), (6, 3, 3)]


def test_several_passes_before_a_backward_pass_count(tmp_path: Path) -> None:
    model = Net()

    def step() -> None:
        (loss(model) + loss(model, 3)).backward()

    assert observed(tmp_path, model, step) == [(5, 2, 2), (5, 2, 2)]


def test_a_pass_with_two_backward_passes_counts_once(tmp_path: Path) -> None:
    model = Net()

    def step() -> None:
        one = loss(model)
        one.backward(retain_graph=True)
        (2 * one).backward()

    assert observed(tmp_path, model, step) == [(2, 1, 1), (2, 1, 1)]


def test_a_recomputed_pass_counts_once(tmp_path: Path) -> None:
    model = Net(recomputes=True)
    assert observed(tmp_path, model, lambda: loss(model).backward()) == [(2, 1, 1), (2, 1, 1)]


def test_parts_that_are_called_separately_count_once_for_each_backward_pass(tmp_path: Path) -> None:
    """As in a GAN: a critic is trained on real and generated rows, then the generator through the critic."""
    model = nn.ModuleDict({"generator": nn.Linear(3, 5), "critic": nn.Linear(5, 1)})
    generator, critic = model["generator"], model["critic"]

    def step() -> None:
        generator(torch.ones(9, 3))  # a preview
        fake = generator(torch.ones(4, 3))
        (critic(torch.ones(6, 5)).mean() - critic(fake.detach()).mean()).backward()
        critic(fake).mean().backward()

    assert observed(tmp_path, model, step) == [(6 + 4, 4, 2)] * 2


def test_losses_are_those_before_scaling_and_a_skipped_update_is_a_step(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    original, wanted = torch.amp.GradScaler.scale, []
    with ss.observe(model, optimizer, root=tmp_path) as run:
        for step in range(4):
            optimizer.zero_grad()
            of_step = loss(model)
            if step == 2:
                model.first.weight.register_hook(lambda grad: grad * float("inf"))
            scaler.scale(of_step).backward()
            scaler.step(optimizer)
            scaler.update()
            wanted.append(of_step.item())
    assert [event["loss"] for event in run.events("step")] == wanted
    assert [event["skipped"] for event in run.events("step")] == [False, False, True, True]
    assert torch.amp.GradScaler.scale is original


class OwnScaler(torch.amp.GradScaler):
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, OwnScaler])
@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_update_counts_once(
    tmp_path: Path, scaler_type: type[torch.amp.GradScaler], fused: bool
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = scaler_type("cpu", init_scale=1024.0)
    with ss.observe(model, optimizer, root=tmp_path) as run:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss(model)).backward()
            if step == 1:
                assert model.first.weight.grad is not None
                model.first.weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
    assert [event["skipped"] for event in run.events("step")] == [False, True, False]


def test_another_model_in_the_loop_does_not_change_the_loss(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    with ss.observe(model, optimizer, root=tmp_path) as run:
        for _ in range(2):
            loss(other).backward()
            of_step = loss(model)
            of_step.backward(retain_graph=True)
            (of_step * 2).backward()
            optimizer.step()
            wanted.append(3 * of_step.item())
    assert [event["loss"] for event in run.events("step")] == pytest.approx(wanted)
