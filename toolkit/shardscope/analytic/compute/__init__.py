"""Computation in a transformer: its matrix products, the bytes that other operations move, and FLOPs per step."""

from shardscope.analytic.compute.work import Matmul, Split

__all__ = ["Matmul", "Split"]
