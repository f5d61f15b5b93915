"""Which cases of the conformance matrix run by default: all at 2 ranks, at 3 and 4 a third of them.

At those each optimizer still meets a third of the cases and each case a third of the optimizers, another third at 3
than at 4. `pytest --every-case` runs the whole product.
"""

from __future__ import annotations

import pytest

from conformance.strategy import OPTIMIZERS, StrategyConformance

WHOLE_AT = 2
SHARE = 3


def thin(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those that run and those left out."""
    kept = [item for item in items if _runs(item)]
    return kept, [item for item in items if not _runs(item)]


def _runs(item: pytest.Item) -> bool:
    if not (isinstance(item, pytest.Function) and item.cls and issubclass(item.cls, StrategyConformance)):
        return True
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if "recompute" not in given or given["pools"] == WHOLE_AT:
        return True
    case = tuple(given[name] for name in ("precision", "accumulation", "recompute", "clip_norm"))
    place = item.cls.cases.index(case) + list(OPTIMIZERS).index(given["optimizer"]) + given["pools"]
    return place % SHARE == 0
