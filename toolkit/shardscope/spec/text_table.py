"""Rows of text as aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def padded(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[list[str]]:
    """Return the cells of a table, padded to the width of their column.

    Args:
        rows: Rows with equally many cells each.
        right: Whether to align all columns but the first to the right, as for numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if right else str.ljust
    return [[row[0].ljust(widths[0]), *map(pad, row[1:], widths[1:])] for row in rows]


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Return a line of text for each row, with columns two spaces apart; see `padded`."""
    return ["  ".join(row).rstrip() for row in padded(rows, right=right)]
