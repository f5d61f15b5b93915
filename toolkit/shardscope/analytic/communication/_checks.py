"""Validation of arguments, with one error message for each kind of invalid value."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.algorithms import ALGORITHMS, OPS, Algorithm, Option
from shardscope.analytic.communication.ring import Floats
from shardscope.errors import SpecError, unknown_name


def find_algorithm(name: str, op: str) -> Algorithm:
    """Return the algorithm with this name; raise a `SpecError` if it is unknown or does not support the operation."""
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
    """Return `value` as floats, after checking that all are at least `least`, and integers if `is_whole`."""
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
    kind = "a whole number" if is_whole else "a number"
    bound = f"above {least:g}" if is_open else f"of {least:g} or more"
    return f"{kind} {bound}{f', {unit}' if unit else ''}"


def check_options(name: str, algorithm: Algorithm, options: dict[str, Any]) -> dict[str, Any]:
    """Check the given options and return them as arrays or bools."""
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
