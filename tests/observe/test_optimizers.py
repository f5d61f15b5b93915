"""Optimizers of every shape under `observe`: several, wrapped, in the backward pass, with closures, with odd state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import shardscope as ss
from shardscope.commands import show
from shardscope.runtime.observe._describe import Seen
from shardscope.runtime.observe._optimizers import inside

Step = Callable[[], float]
"""Trains one step, and returns its loss."""


class Net(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))

    def loss(self, samples: int = 6) -> Tensor:
        return self(torch.ones(samples, 5)).square().mean()


class Sam(Optimizer):
    """Sharpness-aware minimization as it is usually written: a base optimizer steps in place of this one."""

    def __init__(self, parameters: Any, base: type[Optimizer], **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["old"] = each.detach().clone()
                each.add_(each.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.data = self.state[each]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class Several(Optimizer):
    """Optimizers behind one interface, without torch's initialization, so that torch's hooks do not report it."""

    def __init__(self, *inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for each in self.inner for group in each.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for each in self.inner:
            each.step()


def backward(model: Net, *optimizers: Optimizer) -> float:
    model.zero_grad()
    loss = model.loss()
    loss.backward()
    for each in optimizers:
        each.step()
    return loss.item()


def in_backward(kind: type[Optimizer], *, given: bool) -> Callable[[Net], tuple[Optimizer | None, Step]]:
    def make(model: Net) -> tuple[Optimizer | None, Step]:
        each = {parameter: kind([parameter], lr=0.1) for parameter in model.parameters()}

        def update(parameter: Tensor) -> None:
            each[parameter].step()  # type: ignore[index]
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return next(iter(each.values())) if given else None, lambda: backward(model)

    return make


def lbfgs(search: str | None) -> Callable[[Net], tuple[Optimizer, Step]]:
    def make(model: Net) -> tuple[Optimizer, Step]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)

        def step() -> float:
            losses: list[float] = []

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = model.loss()
                loss.backward()
                losses.append(loss.item())
                return loss

            optimizer.step(closure)
            assert len(losses) > 1
            return losses[0]

        return optimizer, step

    return make


def sam_by_hand(model: Net) -> tuple[Optimizer, Step]:
    optimizer = Sam(model.parameters(), SGD, lr=0.1)

    def step() -> float:
        loss = model.loss()
        loss.backward()
        optimizer.first_step()
        model.loss().backward()
        optimizer.second_step()
        return loss.item()

    return optimizer, step


def sam_with_closure(model: Net) -> tuple[Optimizer, Step]:
    optimizer = Sam(model.parameters(), Adam, lr=0.1)

    def step() -> float:
        loss = model.loss()
        loss.backward()
        optimizer.step(lambda: model.loss().backward())
        return loss.item()

    return optimizer, step


def closure_of_sgd(model: Net) -> tuple[Optimizer, Step]:
    optimizer = SGD(model.parameters(), lr=0.1)

    def step() -> float:
        optimizer.zero_grad()
        return float(optimizer.step(lambda: (loss := model.loss(), loss.backward())[0]).detach())  # type: ignore[arg-type, union-attr]

    return optimizer, step


def halves(model: Net, kinds: tuple[type[Optimizer], type[Optimizer]] = (SGD, Adam)) -> list[Optimizer]:
    return [kind(layer.parameters(), lr=0.1) for kind, layer in zip(kinds, (model[0], model[2]), strict=True)]


def two(model: Net) -> tuple[Optimizer, Step]:
    first, second = halves(model)
    return first, lambda: backward(model, first, second)


def behind_one(model: Net) -> tuple[Optimizer, Step]:
    optimizer = Several(*halves(model))
    return optimizer, lambda: backward(model, optimizer)


def fused(model: Net) -> tuple[Optimizer, Step]:
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    return optimizer, lambda: backward(model, optimizer)


WAYS: dict[str, Callable[[Net], tuple[Optimizer | None, Step]]] = {
    "in backward": in_backward(SGD, given=False),
    "in backward, one given": in_backward(Adam, given=True),
    "L-BFGS": lbfgs(None),
    "L-BFGS with line search": lbfgs("strong_wolfe"),
    "SAM by hand": sam_by_hand,
    "SAM with a closure": sam_with_closure,
    "SGD with a closure": closure_of_sgd,
    "two": two,
    "two behind one": behind_one,
    "fused": fused,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_optimizer_step_is_a_step_with_its_first_loss_and_batch(tmp_path: Path, way: str) -> None:
    model = Net()
    optimizer, step = WAYS[way](model)
    with ss.observe(model, optimizer, root=tmp_path) as run:
        losses = [step() for _ in range(3)]
    assert (run.state, run.reason) == ("completed", None)
    assert [event["loss"] for event in run.events("step")] == losses
    assert [event["samples"] for event in run.events("step")] == [6, 6, 6]
    assert run.job.batch.global_batch == 6


def test_an_optimizer_in_the_backward_pass_trains_as_without(tmp_path: Path) -> None:
    def trained(observed: Path | None) -> list[float]:
        model = Net()
        _, step = WAYS["in backward"](model)
        if observed is None:
            return [step() for _ in range(3)]
        with ss.observe(model, root=observed):
            return [step() for _ in range(3)]

    assert trained(tmp_path) == trained(None)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_loss_of_several_roots_is_the_sum_of_those_of_the_model(tmp_path: Path, *, scaled: bool) -> None:
    model, other = Net(), nn.Linear(5, 2)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), GradScaler("cpu", enabled=scaled)
    with ss.observe(model, optimizer, root=tmp_path) as run:
        output = model(torch.ones(6, 5))
        first, second, third = output.square().mean(), output.sum(), other(torch.ones(3, 5)).sum()
        torch.autograd.backward(scaler.scale([first, second, third]))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        output = model(torch.ones(6, 5))
        torch.autograd.backward((root for root in (output.sum(), output.mean())), (torch.tensor(1.0),) * 2)
        optimizer.step()
    losses = [event["loss"] for event in run.events("step")]
    assert losses[0] == pytest.approx(float(first.detach()) + float(second.detach()))
    assert losses[1] == pytest.approx(float(output.sum().detach()) + float(output.mean().detach()))


def own_count(value: Any, seen: set[int]) -> int:
    """Bytes of all tensors in nested lists, tuples and dicts, each storage once."""
    if isinstance(value, Tensor):
        place = value.untyped_storage().data_ptr()
        size = 0 if place in seen else value.untyped_storage().nbytes()
        seen.add(place)
        return size
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(own_count(each, seen) for each in parts)


class Nested(SGD):
    """State in lists, dicts and tuples, one tensor twice, and a reference to the parameter itself."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if not self.state[each]:
                    kept = torch.zeros_like(each)
                    self.state[each] = {"all": [kept, {"half": (torch.zeros(9), kept)}], "of": each, "t": 1}
        return super().step(closure)


@pytest.mark.parametrize("way", ["two", "two behind one", "L-BFGS", "fused", "in backward, one given",
                                 "nested"])  # fmt: skip
def test_optimizer_memory_is_the_state_of_every_optimizer(tmp_path: Path, way: str) -> None:
    model = Net()
    if way == "nested":
        given: Optimizer | None = Nested(model.parameters(), lr=0.1)
        step: Step = lambda: backward(model, given)  # type: ignore[arg-type]
    else:
        given, step = WAYS[way](model)
    made: list[Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda each, *_: made.append(each))
    try:
        with ss.observe(model, given, root=tmp_path) as run:
            for _ in range(3):
                step()
    finally:
        hook.remove()
    seen = {each.untyped_storage().data_ptr() for each in model.parameters()}
    stepped = {id(each): each for each in [*made, *([] if given is None else [given])]}
    expected = sum(own_count(dict(each.state), seen) for each in stepped.values())
    assert run.events("memory")[-1]["optimizer"] == expected > 0


def test_optimizer_memory_of_several_is_not_predicted_and_that_is_said(tmp_path: Path) -> None:
    model = Net()
    first, second = halves(model, (AdamW, AdamW))
    with ss.observe(model, first, root=tmp_path) as run:
        for _ in range(3):
            backward(model, first, second)
    compared = ss.compare(run)
    assert {row.term for row in compared.rows if row.group == "memory"} == {"parameters", "gradients"}
    assert compared.disagreeing == ()
    assert any("optimizer is left out: 2 optimizers update the model" in note for note in compared.notes)


class OfTheUser(Mapping[str, Any]):
    """A mapping whose values cannot be read."""

    def __getitem__(self, key: str) -> Any:
        raise OSError(key)

    def __iter__(self) -> Any:
        return iter(["of", "the", "user"])

    def __len__(self) -> int:
        return 3


def cyclic() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    tree["children"] = [tree]
    return tree


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "attribute", [cyclic, OfTheUser, lambda: [0.5] * 2_000_000, lambda: [[[]] * 1000] * 1000]
)
def test_what_a_user_keeps_in_an_optimizer_is_left_alone(
    tmp_path: Path, attribute: Callable[[], Any]
) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.own = attribute()  # type: ignore[attr-defined]
    optimizer.itself = [optimizer]  # type: ignore[attr-defined]
    start = time.thread_time()  # other work takes no part in it
    assert inside(optimizer) == []
    assert time.thread_time() - start < 0.2
    with ss.observe(model, optimizer, root=tmp_path) as run:
        backward(model, optimizer)
    assert (run.state, run.summary().steps) == ("completed", 1)


def test_optimizers_inside_others_are_found_in_lists_tuples_and_dicts() -> None:
    model = Net()
    inner = [SGD(model.parameters(), lr=0.1) for _ in range(5)]
    outer = Several(inner[0])
    outer.several = [inner[1]]  # type: ignore[attr-defined]
    outer.by_name = {"two": inner[2], "one": inner[1]}  # type: ignore[attr-defined]
    inner[0].deeper = (inner[3],)  # type: ignore[attr-defined]
    inner[3].back = outer  # type: ignore[attr-defined]
    assert [inner.index(each) for each in inside(outer)] == [0, 3, 1, 2]  # type: ignore[arg-type]


def test_a_given_optimizer_that_never_steps_is_named(tmp_path: Path) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ss.observe(model, optimizer, root=tmp_path) as run:
        model.loss().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
    assert run.state == "stopped"
    assert "SGD, the observed optimizer, never stepped after a backward pass" in str(run.reason)
    assert run.summary().state == "stopped"
    assert "recording stopped" in show.text(run)
    assert str(run.reason) in show.text(run)
    with pytest.raises(ss.ShardscopeError, match="recording stopped"):
        ss.compare(run)


class WithoutRate(Optimizer):
    """A wrapper whose groups have no learning rate."""

    def __init__(self, inner: Optimizer | None, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for each in self.param_groups[0]["params"]:
            each.sub_(each.grad, alpha=0.1)


@pytest.mark.parametrize("is_around", [True, False])
def test_an_optimizer_without_a_rate_is_recorded_with_that_of_the_one_inside(
    tmp_path: Path, *, is_around: bool
) -> None:
    model = Net()
    inner = SGD(model.parameters(), lr=0.25) if is_around else None
    optimizer = WithoutRate(inner, model.parameters())
    with ss.observe(model, optimizer, root=tmp_path) as run:
        for _ in range(2):
            backward(model, optimizer)
    assert (run.state, run.summary().steps) == ("completed", 2)
    rates = [math.nan if each["lr"] is None else each["lr"] for each in run.events("step")]
    assert rates == [0.25, 0.25] if is_around else all(map(math.isnan, rates))


def by_hand(model: Net) -> None:
    model.loss().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]


@pytest.mark.parametrize("given", [None, SGD])
def test_gradients_without_an_optimizer_leave_a_run_completed_and_are_noted(
    tmp_path: Path, given: type[SGD] | None
) -> None:
    model = Net()
    optimizer = given(model.parameters(), lr=0.1) if given else None
    with ss.observe(model, optimizer, root=tmp_path) as run:
        for _ in range(3):
            by_hand(model) if optimizer is None else model.loss().backward()
    assert (run.state, run.cause, run.summary().state) == ("completed", None, "completed")
    assert "never stepped after a backward pass of the model" in str(run.reason)
    assert str(run.reason) in show.text(run)


@pytest.mark.parametrize("is_given", [True, False])
def test_an_optimizer_that_takes_the_place_of_the_observed_one_ends_the_recording_in_a_sentence(
    tmp_path: Path, *, is_given: bool
) -> None:
    model = Net()
    first, second = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ss.observe(model, first if is_given else None, root=tmp_path) as run:
        for optimizer in (first, first, second, second, second):
            backward(model, optimizer)
    assert (run.state, run.cause, run.summary().steps) == ("stopped", "recording-stopped", 2)
    assert "recorded nothing after step 2, because the observed optimizer no longer stepped" in str(
        run.reason
    )


def test_an_optimizer_that_steps_more_often_within_each_step_does_not(tmp_path: Path) -> None:
    model = Net()
    often, once = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    with ss.observe(model, once, root=tmp_path) as run:
        for optimizer in (often, often, once, often, often, once, often, often):
            backward(model, optimizer)
    assert (run.state, run.cause, run.summary().steps) == ("completed", None, 2)


def test_a_recording_that_fails_before_the_first_step_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Seen) -> None:
        raise KeyError("of the observer")

    monkeypatch.setattr(Seen, "job", fail)
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ss.observe(model, optimizer, root=tmp_path) as run:
        backward(model, optimizer)
    assert (run.state, run.cause) == ("stopped", "recording-stopped")
    assert "of the observer" in str(run.reason)
    for call in (run.summary, lambda: ss.compare(run)):
        with pytest.raises(ss.ShardscopeError, match=r"nothing of this run was recorded: .*of the observer"):
            call()
