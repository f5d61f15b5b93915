"""Closed-form predictions of a job's communication, memory and pipeline schedule. Needs NumPy, but not torch."""

from shardscope.analytic import communication, memory, schedules, stragglers

__all__ = ["communication", "memory", "schedules", "stragglers"]
