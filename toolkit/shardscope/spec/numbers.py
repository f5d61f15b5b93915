"""Valid ranges of numbers in specs: finite, and small enough for the code that computes with them.

Counts stay below 2**31, which torch and every file format support. A loop over a mistyped count, or
over its square root, therefore ends in reasonable time.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LARGEST_COUNT = 2**31 - 1
LARGEST_SEED = 2**63 - 1
LARGEST_DEGREE = 2**20

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
"""A count of samples, steps, layers and the like; at least 1."""
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
"""A count that may be 0."""
Total = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A sum of counts, such as the parameters of a model: up to the largest signed 64-bit integer."""
Degree = Annotated[int, Field(ge=1, le=LARGEST_DEGREE)]
"""Devices along one axis of parallelism; 1 to 1048576."""
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
"""Seed of a random-number generator; up to the largest signed 64-bit integer."""
MessageMiB = Annotated[float, Field(ge=1e-5, le=1024)]
"""Size of a message or a bucket in MiB: from 1e-5, enough for one fp64 number, to 1024."""
Number = float | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""A finite number. Integers stay integers and must fit into 64 bits."""
