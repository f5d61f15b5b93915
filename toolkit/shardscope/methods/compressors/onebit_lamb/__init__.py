"""1-bit LAMB (Li et al. 2021, arXiv:2104.06069): once the second moment is frozen, first moments travel as signs."""

from __future__ import annotations

from shardscope.methods.compressors.one_bit import OneBitCompression
from shardscope.spec.look import Look


class OneBitLamb(OneBitCompression):
    """For `lamb`."""

    name = "onebit-lamb"
    look = Look("#b866a6", "dashdot", "triangle-down-open")
    optimizer = "lamb"
