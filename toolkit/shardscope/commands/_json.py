"""Printing a result as JSON that every reader accepts."""

from __future__ import annotations

import json
import math
from typing import Any


def as_json(value: Any) -> str:
    """Return a value as indented JSON; infinite and undefined numbers, which JSON does not have, become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
