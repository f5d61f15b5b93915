"""Computation of a transformer: matrix products, bytes that other operations move, and FLOPs of a step."""

from shardscope.analytic.compute.work import Matmul, Split

__all__ = ["Matmul", "Split"]
