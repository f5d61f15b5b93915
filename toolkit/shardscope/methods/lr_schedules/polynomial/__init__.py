"""A power of the straight line, as LARS uses it (You et al. 2017, arXiv:1708.03888)."""

from __future__ import annotations

from pydantic import Field

from shardscope.spec.lr_schedule import LRSchedule


class Polynomial(LRSchedule):
    """Falls with a power of what is left of the run."""

    name = "polynomial"

    power: float = Field(default=2.0, gt=0, le=1000)
    """Exponent of the fall, above 0 and at most 1000. Default 2, as LARS uses it; 1 is ``linear``."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """What is left of the rate just after the last step, 0 to 1."""

    def factor_after_warmup(self, step: int, steps: int) -> float:
        return float(
            self.final_ratio + (1 - self.final_ratio) * (1.0 - self.progress(step, steps)) ** self.power
        )
