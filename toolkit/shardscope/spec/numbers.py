"""The ranges of the numbers that specs hold: finite, and small enough for what computes with them.

Counts stay below 2**31, which torch and every file format take; so a loop over a count, or a square root of one, is
never long by a typing error alone.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LARGEST_COUNT = 2**31 - 1
LARGEST_SEED = 2**63 - 1
LARGEST_DEGREE = 2**20

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
"""Of samples, steps, layers and the like; at least 1."""
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
"""The same where there may be none."""
Total = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A sum of counts, such as the parameters of a model: up to the largest integer of 64 bits."""
Degree = Annotated[int, Field(ge=1, le=LARGEST_DEGREE)]
"""Devices along one axis of parallelism; 1 to 1048576."""
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
"""What seeds random numbers; up to the largest integer of 64 bits."""
MessageMiB = Annotated[float, Field(ge=1e-5, le=1024)]
"""Size of a message or a bucket in MiB: from 1e-5, which is one number of 8 bytes, to 1024."""
Number = float | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Whole numbers stay whole; finite, and whole ones within 64 bits."""
