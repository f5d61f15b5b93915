"""Conversion of the arguments of `break_even` and `compression_speedup`: one or several values, as numbers or text."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from shardscope.errors import SpecError
from shardscope.spec import Compression
from shardscope.spec.units import positive, quantity


def methods_of(methods: Iterable[Compression | str] | Compression | str) -> tuple[Compression, ...]:
    """Return a tuple of compression methods for one or several names or `Compression` objects.

    Raises:
        SpecError: The list is empty, or an item is not a compression method.
    """
    given = [methods] if isinstance(methods, str | Compression) else _several("methods", methods, "'int8'")
    return tuple(map(_method, given))


def _method(method: object) -> Compression:
    if isinstance(method, Compression):
        return method
    if not isinstance(method, str):
        raise SpecError(
            f"methods contains {method!r}, which is not a compression method; "
            "give names such as 'int8', or Compression(...)"
        )
    return Compression(name=method)


def workers_of(workers: Iterable[int] | int) -> tuple[int, ...]:
    """Return one or several worker counts as a tuple of integers, each 2 or more.

    Raises:
        SpecError: The list is empty, or an item is not an integer of 2 or more.
    """
    given = [workers] if isinstance(workers, Integral) else _several("workers", workers, "4")
    return tuple(whole("workers", count, 2) for count in given)


def whole(field: str, value: object, least: int) -> int:
    """Return `value` as an integer of at least `least`.

    Args:
        field: Name of the argument, for the message.
        value: The value to check.
        least: Smallest valid value.

    Raises:
        SpecError: The value is not an integer, or it is too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise SpecError(f"{field}={value!r} is not valid: it should be an integer of {least} or more")
    return int(value)


def latency_of(latency: float | str) -> float:
    """Return a latency in seconds, from a number of seconds or a text with a unit; it must be 0 or more."""
    return quantity(latency, "s", field="latency_s")


def bandwidth_of(bandwidth: float | str) -> float:
    """Return a bandwidth in bytes per second, from a number in that unit or a text with a unit; it must be above 0.

    Raises:
        SpecError: The value is not a bandwidth, or it is 0.
    """
    return positive(quantity(bandwidth, "bytes/s", field="bandwidth"), field="bandwidth", given=bandwidth)


def _several(field: str, given: object, example: str) -> list[object]:
    found = [] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not found:
        raise SpecError(f"{field}={given!r} is empty or not a list; give for example {field}=[{example}]")
    return found
