"""1-bit LAMB (Li et al. 2021, arXiv:2104.06069): signs of first moments, after the second moment is frozen."""

from __future__ import annotations

from shardscope.methods.compressors.one_bit import OneBitCompression
from shardscope.spec.look import MethodStyle
from shardscope.spec.optimizer import OptimizerStates


class OneBitLamb(OneBitCompression):
    """1-bit LAMB, which requires the optimizer `lamb`."""

    name = "onebit-lamb"
    look = MethodStyle("#b866a6", "dashdot", "triangle-down-open")
    optimizer = "lamb"

    def optimizer_states(self, states: OptimizerStates) -> OptimizerStates:
        """Return `states` plus the fresh second moment and two scalars per tensor, ratio and factor (Algorithm 1)."""
        return states._replace(tensors=states.tensors + 1, counter_bytes=states.counter_bytes + 8)
