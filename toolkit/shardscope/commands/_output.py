"""Output formats of commands: standard JSON, aligned columns, and colour.

Colour is used only on terminals, and not if the user has set ``NO_COLOR`` (no-color.org).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from shardscope.runtime.record.bar import is_terminal
from shardscope.show import Cell, padded
from shardscope.spec.units import bytes_text

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}
OF_STATE = {
    "completed": "green",
    "running": "blue",
    "starting": "blue",
    "stopped": "yellow",
    "recording": "yellow",
    "failed": "red",
}
"""Colour of each state of a run, in addition to the name of the state."""


def coloured(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return the text in a colour if `stream` (by default stdout) shows colours, otherwise the text as it is."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if text and shows_colour(stream or sys.stdout) else text


def shows_colour(stream: TextIO) -> bool:
    """Return whether to write colours to a stream."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def as_json(value: Any) -> str:
    """Return a value as indented JSON; NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


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
