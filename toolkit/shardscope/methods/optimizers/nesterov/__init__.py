"""SGD with Nesterov momentum, as in torch (Sutskever et al. 2013)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shardscope.methods.optimizers.sgd import SGD
from shardscope.spec.look import MethodStyle
from shardscope.spec.optimizer import Parameters


class Nesterov(SGD):
    """SGD with Nesterov momentum, which looks one step ahead along the velocity."""

    name = "nesterov"
    usual_rates = (3e-3, 0.3)
    look = MethodStyle("#5f6fd6", "dash", "square")

    momentum: float = Field(default=0.9, gt=0, lt=1)
    """Momentum: decay of the velocity per step, 0 < value < 1; for a momentum of 0, use ``sgd``."""

    def build(self, parameters: Parameters) -> Any:
        from shardscope.methods.optimizers.sgd._torch import build

        return build(self, parameters, nesterov=True)
