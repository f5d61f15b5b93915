"""A run beside its prediction, term by term."""

from shardscope.measure.compare.comparison import ComparedTerm, Comparison
from shardscope.measure.compare.of_run import compare

__all__ = ["ComparedTerm", "Comparison", "compare"]
