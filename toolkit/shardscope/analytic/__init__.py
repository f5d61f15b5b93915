"""Closed-form predictions: communication, memory, pipeline schedules, reliability. Needs NumPy, but not torch."""

from shardscope.analytic import communication, memory, reliability, schedules, stragglers

__all__ = ["communication", "memory", "reliability", "schedules", "stragglers"]
