"""Closed-form predictions: communication, memory, pipeline schedules, reliability. Needs NumPy, but not torch."""

from shardscope.analytic import (
    communication,
    failing_runs,
    large_batch,
    memory,
    reliability,
    schedules,
    stragglers,
)

__all__ = ["communication", "failing_runs", "large_batch", "memory", "reliability", "schedules", "stragglers"]
