"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), as in torch."""

from __future__ import annotations

from typing import Any, Literal

from shardscope.spec.look import MethodStyle
from shardscope.spec.optimizer import Fraction, NonNegative, Optimizer, OptimizerStates, Parameters, Positive


class AdamW(Optimizer):
    """Adam with decoupled weight decay."""

    name = "adamw"
    usual_rates = (3e-4, 3e-2)
    look = MethodStyle("#2a6fb8", "solid", "diamond")

    lr: Positive = 1e-3
    """Learning rate before the schedule scales it, above 0."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay per step of the first and the second moment, each 0 <= value < 1."""
    eps: NonNegative = 1e-8
    """Constant that is added to the square root of the second moment, at least 0."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, at least 0: each step also subtracts ``lr * weight_decay`` times the weights."""
    exclude: Literal["none", "1d"] = "none"
    """Tensors without weight decay: ``none``, or ``1d`` for biases and norms (at most one dimension)."""

    @property
    def states(self) -> OptimizerStates:
        return OptimizerStates(tensors=2, counter_bytes=4)

    @property
    def carries(self) -> str:
        return "moments"

    def build(self, parameters: Parameters) -> Any:
        from shardscope.methods.optimizers.adamw._torch import build

        return build(self, parameters)
