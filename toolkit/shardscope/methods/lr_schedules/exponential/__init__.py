"""Exponential decay, or the exponential rise of a learning-rate range test (Smith 2017, arXiv:1506.01186)."""

from __future__ import annotations

from pydantic import Field

from shardscope.spec.lr_schedule import LRSchedule


class Exponential(LRSchedule):
    """Learning rate that falls or rises by the same factor in each step."""

    name = "exponential"

    final_ratio: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    """Learning rate just after the last step, relative to the full learning rate, above 0. With a value above 1,
    the learning rate rises, as in a range test."""

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return float(self.final_ratio ** self.progress(step, steps))
