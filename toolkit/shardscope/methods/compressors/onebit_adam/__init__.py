"""1-bit Adam (Tang et al. 2021, arXiv:2102.02888): once the second moment is frozen, first moments travel as signs."""

from __future__ import annotations

from shardscope.methods.compressors.one_bit import OneBitCompression
from shardscope.spec.look import Look


class OneBitAdam(OneBitCompression):
    """For `adamw`."""

    name = "onebit-adam"
    look = Look("#b866a6", "dash", "triangle-down")
    optimizer = "adamw"
