"""The number formats that jobs train in, and the short names that jobs and layouts take for the mixed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

JobPrecision = Literal["fp32", "fp64", "bf16-mixed", "fp16-mixed"]
PRECISIONS: tuple[str, ...] = get_args(JobPrecision)
ALIASES: Mapping[str, str] = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}
"""Short names by what they stand for."""


def full_name(precision: Any) -> Any:
    """The precision that an alias stands for; anything else as it is.

    Example:
        >>> full_name("bf16"), full_name("fp32")
        ('bf16-mixed', 'fp32')
    """
    return ALIASES.get(precision, precision) if isinstance(precision, str) else precision
