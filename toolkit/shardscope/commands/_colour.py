"""Colour in a terminal: only where the output is one, and not where the user has set ``NO_COLOR`` (no-color.org)."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from shardscope.runtime.record.bar import is_terminal

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}
OF_STATE = {
    "completed": "green",
    "running": "blue",
    "starting": "blue",
    "stopped": "yellow",
    "recording": "yellow",
    "failed": "red",
}
"""Colour of each state of a run; the word always stands beside it."""


def coloured(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return the text in a colour if `stream` (by default stdout) shows colours, otherwise the text as it is."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if text and shows_colour(stream or sys.stdout) else text


def shows_colour(stream: TextIO) -> bool:
    """Return whether to write colours to a stream."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
