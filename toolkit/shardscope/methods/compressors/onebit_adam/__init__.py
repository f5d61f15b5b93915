"""1-bit Adam (Tang et al. 2021, arXiv:2102.02888): signs of first moments, after the second moment is frozen."""

from __future__ import annotations

from shardscope.methods.compressors.one_bit import OneBitCompression
from shardscope.spec.look import MethodStyle


class OneBitAdam(OneBitCompression):
    """1-bit Adam, which requires the optimizer `adamw`."""

    name = "onebit-adam"
    look = MethodStyle("#b866a6", "dash", "triangle-down")
    optimizer = "adamw"
