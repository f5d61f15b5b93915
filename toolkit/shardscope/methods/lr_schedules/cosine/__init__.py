"""Cosine decay (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts)."""

from __future__ import annotations

import math

from pydantic import Field

from shardscope.spec.lr_schedule import LRSchedule


class Cosine(LRSchedule):
    """Learning rate that falls along half a cosine: slowly, then fast, then slowly again."""

    name = "cosine"

    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate just after the last step, as a fraction of the full learning rate, 0 to 1."""

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return (
            self.final_ratio
            + (1 - self.final_ratio) * (1 + math.cos(math.pi * self.progress(step, steps))) / 2
        )
