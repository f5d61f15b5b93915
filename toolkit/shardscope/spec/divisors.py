"""The divisors of a number, found in the time of its square root, and as messages name them."""

from __future__ import annotations

from bisect import bisect_left
from math import isqrt

_NAMED = 12
"""Divisors that a message names at most."""


def divisors(number: int, *, largest: int | None = None) -> tuple[int, ...]:
    """Divisors in order.

    Args:
        number: At least 1. Takes as many divisions as its square root.
        largest: Leave out those above.

    Example:
        >>> divisors(12, largest=6)
        (1, 2, 3, 4, 6)
    """
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    every = sorted({*small, *(number // value for value in small)})
    return tuple(value for value in every if largest is None or value <= largest)


def divisors_text(number: int, *, near: int) -> str:
    """The divisors as a message offers them: all where they are few, else those around `near`.

    Example:
        >>> divisors_text(16, near=3)
        '1, 2, 4, 8, 16'
    """
    every = divisors(number)
    start = min(max(0, bisect_left(every, near) - _NAMED // 2), max(0, len(every) - _NAMED))
    return ", ".join(map(str, every[start : start + _NAMED]))
