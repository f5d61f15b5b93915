"""What a transformer computes: its matrix products, the bytes beside them, and the FLOPs of a step."""

from shardscope.analytic.compute.work import Matmul, Split

__all__ = ["Matmul", "Split"]
