"""Which cases of the conformance matrix run by default: all at 2 ranks, at 3 and 4 a sixth of them.

At those each optimizer still meets a sixth of the cases, another sixth at 3 than at 4; and each compression method a
sixth of what all methods must pass, each of that on a sixth of the methods.
`pytest --every-case` runs the whole product.
"""

from __future__ import annotations

from typing import Any

import pytest

from conformance.compressor import CompressorConformance
from conformance.strategy import OPTIMIZERS, StrategyConformance

WHOLE_AT = 2
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
    if "compression" not in given or given["pools"] == WHOLE_AT:
        return True
    tests = sorted(name for name in dir(item.cls) if name.startswith("test_"))
    place = item.cls.methods.index(given["compression"]) + tests.index(item.originalname) + given["pools"]
    return place % SHARE == 0


def _meets_optimizer(item: pytest.Function, given: dict[str, Any]) -> bool:
    if "recompute" not in given or given["pools"] == WHOLE_AT:
        return True
    case = tuple(given[name] for name in ("precision", "accumulation", "recompute", "clip_norm"))
    place = item.cls.cases.index(case) + list(OPTIMIZERS).index(given["optimizer"]) + given["pools"]
    return place % SHARE == 0
