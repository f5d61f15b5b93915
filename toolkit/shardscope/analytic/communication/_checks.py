"""Validation of the arguments of communication formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.algorithms import ALGORITHMS, OPS, Algorithm, Option
from shardscope.analytic.communication.ring import Floats
from shardscope.errors import SpecError, unknown_name


def find_algorithm(name: str, op: str) -> Algorithm:
    """Return the algorithm with this name.

    Raises:
        SpecError: The operation or the algorithm is unknown, or the algorithm does not support the operation.
    """
    if op not in OPS:
        raise unknown_name("op", op, OPS)
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    if op not in ALGORITHMS[name].costs:
        able = ", ".join(other for other, algorithm in ALGORITHMS.items() if op in algorithm.costs)
        raise SpecError(f"algorithm={name!r} does not support {op}; use one of {able}")
    return ALGORITHMS[name]


def numbers(
    field: str,
    value: npt.ArrayLike,
    *,
    least: float,
    unit: str,
    is_whole: bool = False,
    is_open: bool = False,
) -> Floats:
    """Return `value` as an array of floats, after checking its range.

    Args:
        field: Name of the argument, for the error message.
        value: A number or an array of numbers.
        least: Minimum value.
        unit: Unit, for the error message.
        is_whole: Whether the numbers must be integers.
        is_open: Whether the numbers must be above `least`, instead of at least `least`.

    Raises:
        SpecError: A value is not a number or out of range.
    """
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise SpecError(
            f"{field}={value!r} is not a number; give {_wanted(least, unit, is_whole, is_open)}"
        ) from None
    good = array > least if is_open else array >= least
    if is_whole:
        good &= array == np.floor(array)
        good &= np.isfinite(array)
    if not good.all():
        bad = f"{array[~good].flat[0]:g}"
        raise SpecError(f"{field}={bad} is out of range; give {_wanted(least, unit, is_whole, is_open)}")
    return array


def _wanted(least: float, unit: str, is_whole: bool, is_open: bool) -> str:
    """Return a description of valid values, for error messages."""
    kind = "a whole number" if is_whole else "a number"
    bound = f"above {least:g}" if is_open else f"of {least:g} or more"
    return f"{kind} {bound}{f', {unit}' if unit else ''}"


def check_options(name: str, algorithm: Algorithm, options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options of an algorithm as arrays or bools, after checking their names and values.

    Raises:
        SpecError: The algorithm does not have the option, or a value is out of range.
    """
    unknown = [option for option in options if option not in algorithm.options]
    if unknown:
        known = ", ".join(algorithm.options) or "none"
        raise SpecError(
            f"{unknown[0]}={options[unknown[0]]!r} is not an option of algorithm={name!r}; its options are {known}"
        )
    return {field: _option(field, algorithm.options[field], value) for field, value in options.items()}


def _option(field: str, option: Option, value: Any) -> Any:
    if value is None and option.default is None:
        return None
    if isinstance(option.default, bool):
        if not isinstance(value, bool | np.bool_):
            raise SpecError(f"{field}={value!r} is not a bool; give True or False")
        return bool(value)
    return numbers(
        field, value, least=option.least, unit=option.help, is_whole=option.is_whole, is_open=option.is_open
    )
