"""Closed-form predictions of a job's communication, memory and schedule before it runs. NumPy only, no torch."""

from shardscope.analytic import communication, memory, schedules

__all__ = ["communication", "memory", "schedules"]
