"""Computation of a transformer: matrix products, bytes moved by other operations, and FLOPs per step."""

from shardscope.analytic.compute.work import Matmul, Split

__all__ = ["Matmul", "Split"]
