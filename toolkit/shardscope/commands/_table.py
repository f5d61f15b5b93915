"""Aligned columns for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.spec.units import bytes_text


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a header and rows as text, with columns aligned left, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def human_bytes(count: float | None) -> str:
    """Return a number of bytes with a decimal unit, such as ``1.5 MB``; a dash for None."""
    return "-" if count is None else bytes_text(count)
