"""Objectives that a study can minimise, each with its meaning and unit."""

from __future__ import annotations

from collections.abc import Mapping

OBJECTIVES: Mapping[str, str] = {
    "loss": "loss on the validation split at the end of the run, in the loss's own unit (cross-entropy: nats)",
    "error": "share of wrong answers on the validation split at the end, from 0 to 1; accuracy is 1 minus it",
    "seconds": "seconds of training: the median step of the slowest rank, its first ones left out, times the steps",
    "bytes": "bytes that all ranks together sent over the whole run",
    "memory": "most bytes that a rank held at a time, of the rank that held most",
}
"""Objectives by name, with a description. All are measured, and lower is better."""
QUALITIES = ("loss", "error")
DEFAULT_OBJECTIVES = ("loss", "seconds", "bytes")
