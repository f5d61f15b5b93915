"""1-bit LAMB (Li et al. 2021, arXiv:2104.06069): once the second moment is frozen, first moments travel as signs."""

from __future__ import annotations

from shardscope.methods.compressors.one_bit import OneBitCompression
from shardscope.spec.look import Look
from shardscope.spec.optimizer import OptimizerStates


class OneBitLamb(OneBitCompression):
    """For `lamb`."""

    name = "onebit-lamb"
    look = Look("#b866a6", "dashdot", "triangle-down-open")
    optimizer = "lamb"

    def optimizer_states(self, states: OptimizerStates) -> OptimizerStates:
        """Algorithm 1 keeps a fresh second moment beside the frozen one, and a ratio and its factor for each tensor."""
        return states._replace(tensors=states.tensors + 1, counter_bytes=states.counter_bytes + 8)
