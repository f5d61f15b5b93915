"""Gradients in half precision, two bytes per element, summed during the all-reduce."""

from __future__ import annotations

from shardscope.methods.compressors.half import HalfFloats
from shardscope.spec.look import MethodStyle


class FP16(HalfFloats):
    """Rounds each element to the nearest half-precision number."""

    name = "fp16"
    look = MethodStyle("#8b8f99", "dash", "circle-open")
    dtype = "float16"
