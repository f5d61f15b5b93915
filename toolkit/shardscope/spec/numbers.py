"""Valid ranges of numbers in specs: finite, and small enough for the code that computes with them.

Counts stay below 2**31, which torch and every file format support. A loop over a mistyped count therefore ends in
reasonable time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, get_args

from pydantic import BaseModel, Field

from shardscope.errors import SpecError, quoted

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
Fraction = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, from 0 to 1."""
LARGEST_QUANTITY = 1e30
"""Upper bound of measured quantities; its inverse bounds non-zero quantities from below. Prevents NaN in formulas."""


def require_plausible(fields: Mapping[str, object]) -> None:
    """Check the numbers in the fields of a calibration, a device or a link, including those in mappings and sequences.

    Raises:
        SpecError: A number is not 0, and its magnitude is not from 1e-30 to 1e30.
    """
    for name, value in fields.items():
        for number in _numbers(value):
            if number and not 1 / LARGEST_QUANTITY <= abs(number) <= LARGEST_QUANTITY:
                raise SpecError(
                    f"{name}={quoted(number)} is not plausible; give a number from {1 / LARGEST_QUANTITY:g} to "
                    f"{LARGEST_QUANTITY:g}, or 0"
                )


def sizes_in(spec: BaseModel) -> dict[str, object]:
    """Return the fields of a spec, except fractions from 0 to 1, which cannot overflow and are never a divisor."""
    limits, fields = get_args(Fraction)[1].metadata, type(spec).model_fields
    return {name: value for name, value in spec if name not in fields or fields[name].metadata != limits}


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, BaseModel):
        yield from _numbers(sizes_in(value))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)


Number = float | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""A finite number. Integers stay integers and must fit into 64 bits."""
