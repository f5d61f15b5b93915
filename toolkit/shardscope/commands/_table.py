"""Aligned columns for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardscope.commands._colour import coloured
from shardscope.show import Cell, padded
from shardscope.spec.units import bytes_text


def aligned(
    header: Sequence[str | Cell],
    rows: Iterable[Iterable[str | Cell]],
    *,
    paint: Callable[[str], str] | None = None,
) -> str:
    """Return a header and rows as text, with columns aligned left, two spaces apart.

    On a terminal the header is bold. `paint` may colour a padded cell, without changing its width.
    """
    first, *rest = padded([header, *rows], num_left=len(header))
    body = ["  ".join(map(paint, row) if paint else row).rstrip() for row in rest]
    return "\n".join([coloured("  ".join(first).rstrip(), "bold"), *body])


def human_bytes(count: float | None) -> str:
    """Return a number of bytes with a decimal unit, such as ``1.5 MB``; a dash for None."""
    return "-" if count is None else bytes_text(count)
