"""The precisions of jobs, and the short names for the mixed ones that jobs and layouts accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

JobPrecision = Literal["fp32", "fp64", "bf16-mixed", "fp16-mixed"]
PRECISIONS: tuple[str, ...] = get_args(JobPrecision)
ALIASES: Mapping[str, str] = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}
"""Full names of the short names."""


def full_name(precision: Any) -> Any:
    """The precision that an alias stands for; any other value unchanged.

    Example:
        >>> full_name("bf16"), full_name("fp32")
        ('bf16-mixed', 'fp32')
    """
    return ALIASES.get(precision, precision) if isinstance(precision, str) else precision
