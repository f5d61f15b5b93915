"""Numbers and states in words, the same in every panel, report and table."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_BYTES = ("B", "kB", "MB", "GB", "TB")


def bytes_text(num_bytes: float) -> str:
    """``12.5 kB``, decimal units, three significant digits."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1000 and unit < len(_BYTES) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{three_digits(size)} {_BYTES[unit]}"


def three_digits(value: float) -> str:
    """A number with three significant digits and no exponent: ``1234``, ``12.3``, ``0.0123``."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"


def seconds_text(seconds: float) -> str:
    """``820 µs``, ``12.3 ms``, ``1.20 s`` or ``2 min 5 s``."""
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


def rate_text(per_second: float, thing: str) -> str:
    """``31.2 k tokens/s``."""
    if per_second >= 1e6:
        return f"{three_digits(per_second / 1e6)} M {thing}/s"
    if per_second >= 1e4:
        return f"{three_digits(per_second / 1e3)} k {thing}/s"
    return f"{three_digits(per_second)} {thing}/s"


def count_text(count: float) -> str:
    """``812``, ``43.4 k``, ``1.3 M``, ``175 G``: of parameters."""
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= factor:
            return f"{three_digits(count / factor)}{unit}"
    return f"{count:.0f}"


def plural(count: int, thing: str) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def listed(items: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    names = list(items)
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def safe(text: object) -> str:
    """Any text of the user's, fit to be put into HTML."""
    return escape(str(text), quote=True)
