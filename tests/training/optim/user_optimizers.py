"""User-defined optimizers, each with a kind of state that is not a tensor of the parameter's shape."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import shardscope as ss


class ScaledDescent(torch.optim.Optimizer):
    """Gradient descent whose rate depends on what a subclass keeps; entry by entry, so that shards may hold it."""

    fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, **self.fields})

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        """By what a gradient is multiplied; changes what is kept."""
        raise NotImplementedError

    def before(self, group: dict[str, Any]) -> None:
        """Advance what a group keeps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            self.before(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.factor(self.state[p], group, p.grad) * p.grad)


class GroupCounter(ScaledDescent):
    """Counts its steps in `param_groups`, as schedule-free optimizers do."""

    fields: ClassVar[dict[str, Any]] = {"k": 0, "weight_sum": 0.0, "betas": (0.9, 0.99)}

    def before(self, group: dict[str, Any]) -> None:
        group["k"] += 1
        group["weight_sum"] += 1 / group["k"]
        group["history"] = (*group.get("history", ()), group["k"])

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        state["z"] = state.get("z", torch.zeros_like(grad)) + grad
        return group["weight_sum"] / (group["k"] + len(group["history"]))


class PythonStep(ScaledDescent):
    """Counts the steps of a parameter in an int, beside a float, a string, a list, a tuple and None."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if not state:
            state.update(
                t=0, step=0, decayed=1.0, phase="first", seen=[], pair=(0, True), nothing=None, by={1: "one"}
            )
            state.update(recent=deque(maxlen=3), m=torch.zeros_like(grad))
        state["t"], state["step"], state["decayed"] = (
            state["t"] + 1,
            state["step"] + 1,
            state["decayed"] * 0.9,
        )
        state["seen"].append(state["t"])
        state["recent"].append(state["t"])
        state["m"].mul_(state["decayed"]).add_(grad)
        state["phase"] = "second" if state["t"] > 3 else "first"
        state["pair"] = (state["t"], state["phase"] == "first")
        rate = 1 / (state["t"] + len(state["seen"]) + sum(state["recent"]))
        return rate * (1 + state["m"].abs()) * (2 if state["phase"] == "first" else 1)


class Product(ScaledDescent):
    """Keeps tensors of another shape than the parameter's, as NAdam does."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if not state:
            state.update(mu_product=torch.ones(()), one=torch.ones(1), m=torch.zeros_like(grad))
        state["mu_product"] *= 0.7
        state["one"].add_(0.5)
        state["m"].lerp_(grad, 0.1)
        return (1 - state["mu_product"]) / state["one"] * (1 + state["m"].abs())


class Narrow(ScaledDescent):
    """Keeps its moments in bf16 and 8 bits, with their bits as they are."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if not state:
            state["m"] = torch.zeros_like(grad, dtype=torch.bfloat16)
            state["codes"] = torch.zeros_like(grad, dtype=torch.uint8)
        state["m"].mul_(0.9).add_(grad)
        state["codes"] += (grad > 0).to(torch.uint8) * 37
        return 1 + state["m"].to(grad.dtype).abs() * state["codes"].to(grad.dtype) / 255


class Shared(ScaledDescent):
    """Keeps an entry of no parameter."""

    def before(self, group: dict[str, Any]) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload]

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        return 1 / self.state["steps"]  # type: ignore[index]


class Attribute(ScaledDescent):
    """Counts its steps in an attribute."""

    count = 0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count = 0

    def before(self, group: dict[str, Any]) -> None:
        self.count += 1

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        state["m"] = state.get("m", torch.zeros_like(grad)) + grad
        return 1 / self.count


class Drawing(ScaledDescent):
    """Adds noise to its steps."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        return 1 + torch.rand_like(grad)


class _Clock:
    def __init__(self) -> None:
        self.ticks = 0


class HiddenObject(ScaledDescent):
    """Counts its steps in an object that no state_dict has."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.clock = _Clock()

    def before(self, group: dict[str, Any]) -> None:
        self.clock.ticks += 1

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        return 1 / self.clock.ticks


class ObjectEntry(ScaledDescent):
    """Keeps an object as an entry of a parameter."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        state.setdefault("clock", _Clock()).ticks += 1
        return 1 / state["clock"].ticks


class Columns(ScaledDescent):
    """Keeps one number for each column of what a rank holds of a matrix, as Adafactor does; its steps ignore them."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        columns = (
            grad.square().flatten(1).sum(0) if grad.dim() > 1 else grad.square().sum().view(1, 1).expand(1, 2)
        )
        state["columns"] = state.get("columns", torch.zeros_like(columns)) + columns
        return 1 + 0 * state["columns"].mean()


class Matrices(ScaledDescent):
    """Keeps a list of matrices, in nested collections and with the elements of one of them by column."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        held = state.get("held", {"Q": [torch.zeros(3, 3), None], "count": (0, [torch.eye(3).mT])})
        one = torch.full((3, 3), float(grad.sum())).triu()
        state["held"] = {"Q": [held["Q"][0] + one, None], "count": (held["count"][0] + 1, [held["Q"][0].mT])}
        return 1 / (1 + 0 * state["held"]["Q"][0].abs().sum() + state["held"]["count"][0])


class Largest(ScaledDescent):
    """Divides by the largest element of a gradient, which an empty one does not have."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if not state:
            state.update(step=0, m=torch.zeros_like(grad), largest=torch.zeros(()))
        state["step"] += 1
        state["largest"] = 0 * grad.abs().max().cpu() + state["step"]
        state["m"].lerp_(grad, 0.1)
        return (1 + state["m"].abs()) / state["largest"]


class Whole(ScaledDescent):
    """Fails with the long vectors that pieces of matrices are."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if grad.dim() == 1 and grad.numel() > 10:
            raise RuntimeError(f"a vector of {grad.numel()} elements is not a bias")
        return 1.0


class PerLayer(ScaledDescent):
    """Forgets a counter on which its steps depend; built with one group per layer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{"params": [p], "lr": lr * 0.9**number} for number, p in enumerate(params)], lr)
        self.hidden = [torch.zeros(3)]

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        self.hidden[0] = self.hidden[0] + 1
        return 1 / self.hidden[0][0]


class NoRate(ScaledDescent):
    """Finds its learning rate itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            del group["lr"]


class EveryForm(ScaledDescent):
    """Keeps a counter of a group, an int, a number as a tensor, a list, a text, and moments in bf16 and 8 bits."""

    fields: ClassVar[dict[str, Any]] = {"k": 0}

    def before(self, group: dict[str, Any]) -> None:
        group["k"] += 1

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if not state:
            state.update(t=0, product=torch.ones(()), seen=[], phase="first")
            state.update(m=torch.zeros_like(grad, dtype=torch.bfloat16))
            state.update(codes=torch.zeros_like(grad, dtype=torch.uint8))
        state["t"] += 1
        state["product"] *= 0.9
        state["seen"].append(state["t"])
        state["phase"] = "second" if state["t"] > 3 else "first"
        state["m"].mul_(0.9).add_(grad)
        state["codes"] += 37
        rate = (2 - state["product"].item()) * (2 if state["phase"] == "first" else 1)
        shares = state["codes"].to(grad.dtype) / 255 + 10 / (state["t"] + len(state["seen"]) + group["k"])
        return rate * (1 + state["m"].to(grad.dtype).abs()) * shares


class Unusual(ScaledDescent):
    """Keeps a size, a number that is not one, and a tensor all of whose elements are the same one in memory."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if not state:
            state.update(size=torch.Size([0]), loss=float("nan"), array=np.full(2, np.nan))
            state.update(one=torch.zeros(1, dtype=grad.dtype).expand(grad.shape))
        state["size"] = torch.Size([state["size"][0] + 1])
        state["one"] = (
            state["one"] + 1 if state["one"].numel() != 1 else state["one"].view(1)[:1].expand(grad.shape)
        )
        assert math.isnan(state["loss"]) and np.isnan(state["array"]).all()
        return 1 / state["size"].numel()


class PlainState(ScaledDescent):
    """Keeps its state in a dictionary without defaults."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.state: Any = {p: {"t": 0} for group in self.param_groups for p in group["params"]}

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        state["t"] += 1
        return 1 / state["t"]


class KeepsGradient(ScaledDescent):
    """Keeps the last gradient itself instead of a copy."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        last = state.get("last", torch.zeros_like(grad))
        state["last"] = grad
        return 1 / (1 + (last - grad).abs())


class DropsSetting(ScaledDescent):
    """Removes a value of its groups after the first step."""

    fields: ClassVar[dict[str, Any]] = {"is_first": True}

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        return 2.0 if "is_first" in group else 1.0

    def step(self, closure: Any = None) -> None:
        """Take a step."""
        super().step()
        for group in self.param_groups:
            group.pop("is_first", None)


class TensorState(ScaledDescent):
    """Keeps a tensor, and no dictionary, for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = self.state.get(p, 0) + p.grad  # type: ignore[assignment, operator]
                p.sub_(group["lr"] * self.state[p])


class SharedMemory(ScaledDescent):
    """Keeps one tensor under two names."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if not state:
            state["a"] = state["b"] = torch.zeros_like(grad)
        state["a"].add_(grad)
        return 1 / (1 + state["b"].abs())


class OrderedEntry(ScaledDescent):
    """Keeps a collection of a type that would not come back."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        state.setdefault("by", OrderedDict(t=0))["t"] += 1
        return 1 / state["by"]["t"]


class Cyclic(ScaledDescent):
    """Keeps a list that contains itself."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if not state:
            state["all"] = []
            state["all"].append(state["all"])
        return 1.0


class SumsNorm(ScaledDescent):
    """Sums a number over the ranks itself."""

    def before(self, group: dict[str, Any]) -> None:
        total = torch.ones(())
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        group["norm"] = group.get("norm", 0.0) + total.item()

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        return 1 / group["norm"]


class SumsGradients(ScaledDescent):
    """Sums gradients over the ranks itself, as if all had the same parameters."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        total = grad.clone()
        torch.distributed.all_reduce(total)
        return 1 / (1 + total.abs())


class SumsMatrices(SumsGradients):
    """Sums a number over the ranks for each matrix, of which ranks may have different numbers."""

    def factor(self, state: dict[str, Any], group: dict[str, Any], grad: Tensor) -> float | Tensor:
        if grad.dim() > 1 and grad.shape[0] < 6:
            torch.distributed.all_reduce(torch.ones(()))
        return 1.0


class WithClosure(ScaledDescent):
    """Wants a closure."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        """Take a step."""


KINDS: dict[str, type[ScaledDescent]] = {
    kind.__name__: kind for kind in (
        GroupCounter, PythonStep, Product, Narrow, Shared, Attribute, HiddenObject, ObjectEntry, Columns, Matrices,
        Drawing, Largest, Whole, PerLayer, EveryForm, NoRate, Unusual, PlainState, KeepsGradient, DropsSetting,
        TensorState, SharedMemory, OrderedEntry, Cyclic, SumsNorm, SumsGradients, SumsMatrices, WithClosure,
    )
}  # fmt: skip


class UserOptimizer(ss.Optimizer):
    """One of `KINDS`, by name."""

    name = "user-kind"

    lr: float = 0.02
    type_name: str = "GroupCounter"

    def build(self, parameters: Any) -> torch.optim.Optimizer:
        """Build it for one rank."""
        return KINDS[self.type_name]([p for _, p in parameters.named], self.lr)


class ByName(ss.Optimizer):
    """Trains the last layer faster, and finds it by its name; a test may add a setting that cannot be copied."""

    name = "by-name"

    lr: float = 0.02
    setting: str = "number"
    is_fussy: bool = False

    def build(self, parameters: Any) -> torch.optim.Optimizer:
        """Build it for one rank."""
        named = dict(parameters.named)
        last = named["6.weight"]
        if self.is_fussy and last.shape != (10, 5):
            raise ValueError("the last layer has 10 rows")
        built = KINDS["PythonStep"]([p for p in named.values() if p is not last], self.lr)
        built.add_param_group({"params": [last], "lr": 2 * self.lr, "setting": SETTINGS[self.setting](last)})
        return built


def _group_of_ranks(last: Tensor) -> Any:
    dist = torch.distributed
    return dist.group.WORLD if dist.is_initialized() else None


SETTINGS: dict[str, Any] = {
    "number": lambda last: 3,
    "group of ranks": _group_of_ranks,
    "lock": lambda last: [threading.Lock()],
    "generator": lambda last: torch.Generator(),
    "computed": lambda last: {"twice": (2 * last,)},
}
