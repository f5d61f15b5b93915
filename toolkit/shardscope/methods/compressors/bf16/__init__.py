"""Gradients in bfloat16, two bytes per element, summed during the all-reduce."""

from __future__ import annotations

from shardscope.methods.compressors.half import HalfFloats
from shardscope.spec.look import MethodStyle


class BF16(HalfFloats):
    """Rounds each element to the nearest bfloat16 number."""

    name = "bf16"
    look = MethodStyle("#8b8f99", "dot", "circle")
    dtype = "bfloat16"
