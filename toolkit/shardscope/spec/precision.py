"""The precisions of jobs, and short names for the mixed precisions, which jobs and layouts accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

JobPrecision = Literal["fp32", "fp64", "bf16-mixed", "fp16-mixed"]
PRECISIONS: tuple[str, ...] = get_args(JobPrecision)
ALIASES: Mapping[str, str] = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}
"""Full name for each short name."""


def full_name(precision: Any) -> Any:
    """Return the full name of a precision given by its alias; return any other value unchanged.

    Example:
        >>> full_name("bf16"), full_name("fp32")
        ('bf16-mixed', 'fp32')
    """
    return ALIASES.get(precision, precision) if isinstance(precision, str) else precision
