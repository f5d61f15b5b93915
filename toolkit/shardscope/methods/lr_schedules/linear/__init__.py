"""Linear decay from the full learning rate to the final one."""

from __future__ import annotations

from pydantic import Field

from shardscope.spec.lr_schedule import LRSchedule


class Linear(LRSchedule):
    """Learning rate that falls by the same amount in each step."""

    name = "linear"

    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate just after the last step, as a fraction of the full learning rate, 0 to 1."""

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return self.final_ratio + (1 - self.final_ratio) * (1.0 - self.progress(step, steps))
