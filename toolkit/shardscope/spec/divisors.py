"""Divisors of a number n, computed in O(sqrt(n)) time, and their list in error messages."""

from __future__ import annotations

from bisect import bisect_left
from math import isqrt

_NAMED = 12
"""Maximum number of divisors listed in a message."""


def divisors(number: int, *, largest: int | None = None) -> tuple[int, ...]:
    """Return the divisors of `number` in ascending order.

    Args:
        number: The number, at least 1.
        largest: Upper limit, above which divisors are omitted; None for no limit.

    Example:
        >>> divisors(12, largest=6)
        (1, 2, 3, 4, 6)
    """
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    every = sorted({*small, *(number // value for value in small)})
    return tuple(value for value in every if largest is None or value <= largest)


def divisors_text(number: int, *, near: int) -> str:
    """Return the divisors as text for an error message: all if there are at most 12, else the 12 around `near`.

    Example:
        >>> divisors_text(16, near=3)
        '1, 2, 4, 8, 16'
    """
    every = divisors(number)
    start = min(max(0, bisect_left(every, near) - _NAMED // 2), max(0, len(every) - _NAMED))
    return ", ".join(map(str, every[start : start + _NAMED]))
