"""Which tests run: three tiers, each a part of the next.

``make test`` is quick: it leaves out what is marked ``slow`` (notebooks, browsers, studies with kills) and runs a test
on real ranks at one of 2, 3 and 4 ranks, drawn by its name, or at all of them if it skips some by itself. ``pytest
--full``, which every change must pass, adds what is slow and more of the matrix that holds every strategy against one
process, a sixth of it, with every optimizer. ``pytest --every-case`` runs the whole matrix, everything at
2, 3 and 4 ranks, and what is marked ``weekly``.

In the full tier an optimizer meets a sixth of a strategy's cases (precision, accumulation, recomputation, clip) at 2
ranks, another sixth than the next optimizer and than under the next strategy, and other sixths at 3 and at 4 ranks. For
one strategy with three cases an optimizer may stay without some case or world size; over the strategies each optimizer
meets every case and every world size. Where only precision or nothing varies (bf16, clipping), each optimizer runs at
one of the world sizes, at another under the next strategy. Of compression methods all that they must pass runs at 2
ranks, and a sixth of it at 3 and 4, each of that on a sixth of the methods. The quick tier runs a third of that.
"""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import pytest

from conformance.compressor import CompressorConformance
from conformance.strategy import OPTIMIZERS, StrategyConformance
from shardscope.spec.strategy import Strategy, strategies

FEWEST, SIZES = 2, 3
"""World sizes are 2, 3 and 4."""
SHARE = 6


def thin(items: list[pytest.Item], *, quick: bool) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those that run and those left out, in the quick tier or the full one."""
    kept = [item for item in items if _runs(item) and not (quick and _is_long(item))]
    chosen = set(kept)
    return kept, [item for item in items if item not in chosen]


def _is_long(item: pytest.Item) -> bool:
    """Whether a test of the full tier is left out of the quick one."""
    if item.get_closest_marker("slow"):
        return True
    ranks = _ranks_of(item)
    if ranks is None:
        return False
    if not _is_of_the_matrix(item):
        return False
    return zlib.crc32(item.nodeid.encode()) % (SIZES if ranks == FEWEST else SHARE * SIZES) != 0


def _is_of_the_matrix(item: pytest.Item) -> bool:
    matrix = (CompressorConformance, StrategyConformance)
    return isinstance(item, pytest.Function) and item.cls is not None and issubclass(item.cls, matrix)


def _runs(item: pytest.Item) -> bool:
    """Whether a test belongs to the full tier."""
    if item.get_closest_marker("weekly"):
        return False
    if not _is_of_the_matrix(item):
        return _meets_ranks(item)
    assert isinstance(item, pytest.Function)
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if issubclass(item.cls, CompressorConformance):
        return _meets_method(item, given)
    return _meets_optimizer(item, given)


def _ranks_of(item: pytest.Item) -> int | None:
    """The size of the group that a test runs on, where it runs on real ranks."""
    return item.callspec.params.get("pools") if hasattr(item, "callspec") else None


def _meets_ranks(item: pytest.Item) -> bool:
    """Whether a test runs at its number of ranks: at the one drawn for it, or at all if it skips some by itself."""
    ranks = _ranks_of(item)
    if ranks is None:
        return True
    assert isinstance(item, pytest.Function)
    name = item.nodeid.replace(f"{ranks} ranks", "")
    is_drawn = zlib.crc32(name.encode()) % SIZES == ranks - FEWEST
    return is_drawn or "pytest.skip(" in inspect.getsource(item.function)


def _meets_method(item: pytest.Function, given: dict[str, Any]) -> bool:
    if "compression" not in given or given["pools"] == FEWEST:
        return True
    tests = sorted(name for name in dir(item.cls) if name.startswith("test_"))
    place = item.cls.methods.index(given["compression"]) + tests.index(item.originalname) + given["pools"]
    return place % SHARE == 0


def _meets_optimizer(item: pytest.Function, given: dict[str, Any]) -> bool:
    if "optimizer" not in given:
        return True
    turn = list(strategies()).index(Strategy.resolve(item.cls.strategy).name)
    place = list(OPTIMIZERS).index(given["optimizer"]) + given["pools"] + turn
    if "recompute" not in given:
        return (place + (given.get("precision") == "fp32")) % SIZES == 0
    case = tuple(given[name] for name in ("precision", "accumulation", "recompute", "clip_norm"))
    return (place + item.cls.cases.index(case)) % SHARE == 0
