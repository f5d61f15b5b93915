"""Which errors only tell that another rank has gone, and none of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONSEQUENCES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "timed out",
    "recv",
    "Connection",
    "on another rank",
)

_TYPES = {"RuntimeError", "DistBackendError", "DistNetworkError", "EvaluationError"}
"""Errors that a lost peer raises; the last names another of them in its message."""


def is_consequence(event: Mapping[str, Any]) -> bool:
    """Whether an error only tells that another rank has gone."""
    return event["type"] in _TYPES and any(sign in event["message"] for sign in _CONSEQUENCES)
