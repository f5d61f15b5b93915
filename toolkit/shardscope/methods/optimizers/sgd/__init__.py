"""Stochastic gradient descent, plain or with momentum, as in torch."""

from __future__ import annotations

from typing import Any, Literal

from shardscope.spec.look import MethodStyle
from shardscope.spec.optimizer import Fraction, NonNegative, Optimizer, OptimizerStates, Parameters, Positive


class SGD(Optimizer):
    """SGD with optional momentum: ``v = momentum v + g + weight_decay w; w -= lr v``."""

    name = "sgd"
    usual_rates = (1e-2, 1.0)
    scaling = "linear"
    takes_sparse = True
    look = MethodStyle("#777c85", "dot", "circle")

    lr: Positive = 0.1
    """Learning rate before the schedule scales it, above 0."""
    momentum: Fraction = 0.0
    """Momentum: decay of the velocity per step, 0 <= value < 1."""
    weight_decay: NonNegative = 0.0
    """Weight decay, at least 0: this multiple of the weights is added to the gradient."""
    exclude: Literal["none", "1d"] = "none"
    """Tensors without weight decay: ``none``, or ``1d`` for biases and norms (at most one dimension)."""

    @property
    def states(self) -> OptimizerStates:
        return OptimizerStates(tensors=int(self.momentum > 0))

    @property
    def carries(self) -> str:
        return "velocity" if self.momentum else "nothing"

    def build(self, parameters: Parameters) -> Any:
        from shardscope.methods.optimizers.sgd._torch import build

        return build(self, parameters, nesterov=False)
