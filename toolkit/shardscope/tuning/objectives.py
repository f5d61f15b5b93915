"""Objectives that a study can minimise, each with its meaning and unit."""

from __future__ import annotations

from collections.abc import Mapping

OBJECTIVES: Mapping[str, str] = {
    "loss": "loss on the validation split at the end of the run, in the loss's own unit (cross-entropy: nats)",
    "error": "fraction of wrong answers on the validation split at the end, from 0 to 1 (1 minus the accuracy)",
    "seconds": "training time in seconds: median step of the slowest rank, without the first steps, times the steps",
    "bytes": "bytes that all ranks together sent over the whole run",
    "memory": "peak memory, in bytes, of the rank that needed the most",
}
"""Descriptions of the objectives by name. All are measured, and lower is better."""
QUALITIES = ("loss", "error")
DEFAULT_OBJECTIVES = ("loss", "seconds", "bytes")
