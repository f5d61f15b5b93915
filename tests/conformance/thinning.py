"""Which cases of the conformance matrix run by default: at 2 ranks a third of the strategies', at 3 and 4 a sixth.

So an optimizer meets a third of a strategy's cases (precision, accumulation, recomputation, clip) at 2 ranks, another
third than the next optimizer and than under the next strategy, and other sixths at 3 and at 4 ranks. For one strategy
with three cases an optimizer may stay without some case or world size; over the strategies each optimizer meets every
case and every world size. Where only precision or nothing varies (bf16, clipping), each optimizer runs at one of the
world sizes, at another under the next strategy. Of compression methods all that they must pass runs at 2 ranks, and a
sixth of it at 3 and 4, each of that on a sixth of the methods. `pytest --every-case` runs the whole product.
"""

from __future__ import annotations

from typing import Any

import pytest

from conformance.compressor import CompressorConformance
from conformance.strategy import OPTIMIZERS, StrategyConformance
from shardscope.spec import STRATEGIES
from shardscope.spec.strategy import parse_strategy

FEWEST, SIZES = 2, 3
"""World sizes are 2, 3 and 4."""
SHARE = 6


def thin(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those that run and those left out."""
    kept = [item for item in items if _runs(item)]
    return kept, [item for item in items if not _runs(item)]


def _runs(item: pytest.Item) -> bool:
    if not (isinstance(item, pytest.Function) and item.cls):
        return True
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if issubclass(item.cls, CompressorConformance):
        return _meets_method(item, given)
    return not issubclass(item.cls, StrategyConformance) or _meets_optimizer(item, given)


def _meets_method(item: pytest.Function, given: dict[str, Any]) -> bool:
    if "compression" not in given or given["pools"] == FEWEST:
        return True
    tests = sorted(name for name in dir(item.cls) if name.startswith("test_"))
    place = item.cls.methods.index(given["compression"]) + tests.index(item.originalname) + given["pools"]
    return place % SHARE == 0


def _meets_optimizer(item: pytest.Function, given: dict[str, Any]) -> bool:
    if "optimizer" not in given:
        return True
    turn = list(STRATEGIES).index(parse_strategy(item.cls.strategy).kind)
    place = list(OPTIMIZERS).index(given["optimizer"]) + given["pools"] + turn
    if "recompute" not in given:
        return (place + (given.get("precision") == "fp32")) % SIZES == 0
    case = tuple(given[name] for name in ("precision", "accumulation", "recompute", "clip_norm"))
    share = SIZES if given["pools"] == FEWEST else SHARE
    return (place + item.cls.cases.index(case)) % share == 0
