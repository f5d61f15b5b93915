"""An optimizer that moves by signs."""

from __future__ import annotations

from typing import Any

import shardscope as ss


class Lion(ss.Optimizer):
    """Moves by the sign of its momentum (Chen et al. 2023, arXiv:2302.06675)."""

    name = "lion"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)

    def build(self, parameters: Any) -> Any:
        from tidewater._torch import LionStep

        return LionStep(parameters.groups(), {"lr": self.lr, "betas": self.betas})
