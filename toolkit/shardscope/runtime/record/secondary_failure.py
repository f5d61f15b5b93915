"""Recognise errors that only report that another rank has died."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TIMED_OUT = "Timed out waiting"
"""Part of the error of a rank that has waited for others for too long."""
_CONSEQUENCES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    TIMED_OUT,
    "timed out",
    "recv",
    "Connection",
    "on another rank",
)

_TYPES = {"RuntimeError", "DistBackendError", "DistNetworkError", "EvaluationError"}
"""Types of errors raised when another rank dies; an `EvaluationError` names the original type in its message."""


def is_secondary_failure(event: Mapping[str, Any]) -> bool:
    """Return whether an error event only reports that another rank has died."""
    return event["type"] in _TYPES and any(sign in event["message"] for sign in _CONSEQUENCES)
