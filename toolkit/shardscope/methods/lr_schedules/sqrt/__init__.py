"""Decay with the inverse square root of the step number (Vaswani et al. 2017, arXiv:1706.03762, section 5.3)."""

from __future__ import annotations

import math

from shardscope.spec.lr_schedule import LRSchedule


class Sqrt(LRSchedule):
    """Learning rate that falls in proportion to the inverse square root of the step number after the warm-up."""

    name = "sqrt"

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return math.sqrt(max(self.warmup_steps, 1) / step)
