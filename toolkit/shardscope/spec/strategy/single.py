"""One process."""

from __future__ import annotations

from typing import ClassVar, Literal

from shardscope.spec.strategy.base import StrategySpec


class Single(StrategySpec):
    """One process and no communication: the oracle that every other strategy is held against."""

    kind: Literal["single"] = "single"
    min_ranks: ClassVar[int] = 1
    max_ranks: ClassVar[int | None] = 1
