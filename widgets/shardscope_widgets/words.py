"""Numbers as text, formatted the same in every panel, report and table."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_BYTES = ("B", "kB", "MB", "GB", "TB")


def bytes_text(num_bytes: float) -> str:
    """Format bytes as ``12.5 kB``: decimal units, three significant digits."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1000 and unit < len(_BYTES) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{three_digits(size)} {_BYTES[unit]}"


def three_digits(value: float) -> str:
    """Format a number with three significant digits, as ``12.3`` or ``0.0123``; from 100 on as an integer, ``1234``."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"


def seconds_text(seconds: float) -> str:
    """Format a duration as ``820 µs``, ``12.3 ms``, ``1.2 s`` or ``2 min 5 s``."""
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


def rate_text(per_second: float, thing: str) -> str:
    """Format a rate as ``31.2 k tokens/s``."""
    if per_second >= 1e6:
        return f"{three_digits(per_second / 1e6)} M {thing}/s"
    if per_second >= 1e4:
        return f"{three_digits(per_second / 1e3)} k {thing}/s"
    return f"{three_digits(per_second)} {thing}/s"


def count_text(count: float) -> str:
    """Format a count of parameters as ``812``, ``43.4 k``, ``1.3 M`` or ``175 G``."""
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= factor:
            return f"{three_digits(count / factor)}{unit}"
    return f"{count:.0f}"


def plural(count: int, thing: str) -> str:
    """Format a count with its noun: ``1 rank``, ``4 ranks``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def listed(items: Iterable[str]) -> str:
    """Join items as ``a``, ``a and b`` or ``a, b and c``."""
    names = list(items)
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def safe(text: object) -> str:
    """Return ``str(text)`` escaped for HTML."""
    return escape(str(text), quote=True)
