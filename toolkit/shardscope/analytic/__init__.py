"""The closed forms: what formulas say of a job before it runs. NumPy only, no torch."""

from shardscope.analytic import communication, memory, schedules

__all__ = ["communication", "memory", "schedules"]
