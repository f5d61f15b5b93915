"""Polynomial decay, as used by LARS (You et al. 2017, arXiv:1708.03888)."""

from __future__ import annotations

from pydantic import Field

from shardscope.spec.lr_schedule import LRSchedule


class Polynomial(LRSchedule):
    """Learning rate that falls in proportion to a power of the remaining fraction of the run."""

    name = "polynomial"

    power: float = Field(default=2.0, gt=0, le=1000)
    """Exponent of the decay, above 0 and at most 1000. The default 2 is used by LARS; 1 equals ``linear``."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate just after the last step, as a fraction of the full learning rate, 0 to 1."""

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return float(
            self.final_ratio + (1 - self.final_ratio) * (1.0 - self.progress(step, steps)) ** self.power
        )
