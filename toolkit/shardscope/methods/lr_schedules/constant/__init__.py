"""Constant learning rate after the warm-up."""

from __future__ import annotations

from shardscope.spec.lr_schedule import LRSchedule


class Constant(LRSchedule):
    """Learning rate that stays at its full value after the warm-up."""

    name = "constant"

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return 1.0
