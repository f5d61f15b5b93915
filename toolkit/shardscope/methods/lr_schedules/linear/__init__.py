"""A straight line from the full rate to what is left of it at the end."""

from __future__ import annotations

from pydantic import Field

from shardscope.spec.lr_schedule import LRSchedule


class Linear(LRSchedule):
    """Falls by the same amount from step to step."""

    name = "linear"

    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """What is left of the rate just after the last step, 0 to 1."""

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return self.final_ratio + (1 - self.final_ratio) * (1.0 - self.progress(step, steps))
