"""Format numbers as text, in the same way in every panel, report and table."""

from __future__ import annotations

from html import escape

from shardscope.runlog.axes import collective_text
from shardscope.spec.units import bytes_text, duration_text, listed, plural, rate_text, scaled, three_digits

__all__ = [
    "AXIS_LABELS", "bytes_text", "collective_text", "count_text", "duration_text", "listed", "plural", "rate_text",
    "safe", "three_digits",
]  # fmt: skip
AXIS_LABELS = {
    "data": "Data ranks", "tensor": "Tensor ranks", "pipeline": "Pipeline stages", "context": "Context ranks",
    "expert": "Expert ranks", "zero": "ZeRO stage",
}  # fmt: skip
"""Labels of the controls for degrees of parallelism, in every panel."""
_COUNTS = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def count_text(count: float) -> str:
    """Format a count of parameters as ``812``, ``43.4 k``, ``1.3 M`` or ``175 G``."""
    return scaled(count, _COUNTS)


def safe(text: object) -> str:
    """Return ``str(text)`` escaped for HTML."""
    return escape(str(text), quote=True)
