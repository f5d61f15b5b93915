"""Blocks that take and return tensors in all kinds of objects, where parameters are gathered a block at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.ranks import RankPool
from conformance.users import Case, follow, plain

WIDTH = 8


@dataclass
class Record:
    hidden: Tensor


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.deep = [{"hidden": hidden, "self": self}]

    @property
    def hidden(self) -> Tensor:
        return self.deep[0]["hidden"]


class Attributed(OrderedDict[str, Tensor]):
    """As of Hugging Face: made of keywords."""

    @property
    def hidden(self) -> Tensor:
        return self["hidden"]


class Named(NamedTuple):
    hidden: Tensor


def attributed(hidden: Tensor) -> Attributed:
    return Attributed(hidden=hidden)


def with_hidden(hidden: Tensor) -> SimpleNamespace:
    return SimpleNamespace(hidden=hidden)


class Block(nn.Module):
    """Leaves a result behind, beside what it returns."""

    def __init__(self, wrap: Callable[[Tensor], Any], leaves: bool) -> None:
        super().__init__()
        self.inner, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wrap, self.leaves, self.aux = wrap, leaves, None

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, Tensor) else x.hidden
        y = torch.tanh(self.inner(x))
        if self.leaves:
            self.aux = self.router(x).square().mean()
        else:
            y = y + self.router(x)
        return self.wrap(y)


class Model(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], leaves: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(wrap, leaves) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.wrap, self.leaves = wrap, leaves

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        y = self.head(x if isinstance(x, Tensor) else x.hidden)
        if self.leaves:
            y = y + sum(block.aux for block in self.blocks)
        return self.wrap(y)


class Late(Block):
    """Leaves a result in a private attribute, which it has from the second step on only."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight.detach()
        if not hasattr(self, "_start"):
            self._start = weight.clone()
        y = torch.tanh(self.inner(x)) + self.router(x)
        if not torch.equal(weight, self._start):
            self._aux = self.router(x).square().mean()  # last, so its gradient comes before that of `y`
        return y


class Later(Model):
    def __init__(self) -> None:
        super().__init__(lambda y: y)
        self.blocks = nn.ModuleList(Late(self.wrap, leaves=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + sum(getattr(block, "_aux", 0.0) for block in self.blocks)


class Writer(nn.Module):
    """Hands its result on in what it is given, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any, *, history: list[Tensor]) -> None:
        hidden = state["hidden"] if isinstance(state, dict) else state.hidden
        y = torch.tanh(self.inner(hidden)) + hidden
        history.append(y)
        if isinstance(state, dict):
            state["hidden"] = y
        else:
            state.hidden = y


class Written(nn.Module):
    """Blocks with a hook of the user's, which must see the state that they are given."""

    def __init__(self, make_state: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writer() for _ in range(3))
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.make_state = make_state
        for block in self.blocks:
            block.register_forward_pre_hook(self.halve)

    @staticmethod
    def halve(_: nn.Module, args: tuple[Any, ...]) -> None:
        (state,) = args
        if isinstance(state, dict):
            state["hidden"] = state["hidden"] / 2
        else:
            state.hidden = state.hidden / 2

    def forward(self, x: Tensor) -> Tensor:
        state, history = self.make_state(hidden=self.first(x)), []
        for block in self.blocks:
            block(state, history=history)
        return self.head(torch.stack(history).mean(dim=0))


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, WIDTH, generator=generator)
    return x, x[:, 0].long().abs() % 3


def loss(output: Any, target: Tensor) -> Tensor:
    scores = output if isinstance(output, Tensor) else output.hidden
    return functional.cross_entropy(scores, target) + 0.1 * scores.square().mean()


KINDS = {kind.__name__: kind for kind in (Record, Slotted, Plain, attributed, Named, with_hidden)}
STATES = (dict, Record, Slotted, SimpleNamespace)
CASES = {
    **{name: Case(lambda kind=kind: Model(kind), rows, loss) for name, kind in KINDS.items()},
    **{f"written to a {kind.__name__}": Case(lambda kind=kind: Written(kind), rows, loss) for kind in STATES},
    "left behind": Case(lambda: Model(lambda y: y, leaves=True), rows, loss),
    "left behind later": Case(Later, rows, loss),
    "left behind in an object": Case(lambda: Model(Plain, leaves=True), rows, loss),
}


@cache
def expected(name: str) -> Any:
    return plain(CASES[name], loss)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero-2", "zero-3"])
def test_whatever_a_block_returns_trains_as_in_a_plain_loop(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    """All of them on two ranks, and every third on three and four."""
    names = list(CASES) if pool.world_size == 2 else list(CASES)[pool.world_size % 3 :: 3]
    for name in names:
        follow(pool, tmp_path, CASES[name], strategy, expected(name))


def test_recomputed_blocks_may_return_objects_too(pool: RankPool, tmp_path: Path) -> None:
    recompute = ["selective", "full"][pool.world_size % 2]
    follow(pool, tmp_path, CASES["Plain"], "zero-3", expected("Plain"), recompute=recompute)


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3"])
def test_a_block_whose_tensors_cannot_be_found_is_refused(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    def hidden(y: Tensor) -> Any:
        return SimpleNamespace(hidden=1.0, ask=lambda: y)

    class Closed(Model):
        def forward(self, x: Tensor) -> Any:
            return self.head(self.blocks[0](x).ask())

    case = Case(lambda: Closed(hidden), rows, loss)
    job = case.job(strategy, pool.world_size)

    def refused(context: Any) -> str:
        from shardscope.errors import SpecError
        from shardscope.training.trainer import Trainer

        trainer = Trainer(job, context, tmp_path)
        with pytest.raises(SpecError) as caught:
            trainer.take_step(1)
        trainer.strategy.close()
        return str(caught.value)

    for text in pool.run(refused, tmp_path):
        assert text.startswith("layer 'blocks.0' returned SimpleNamespace without a tensor that depends on")
        assert f"strategy='{strategy}'" in text
