"""A text progress bar for runs and studies, and a test of whether a stream can rewrite a line."""

from __future__ import annotations

import sys

WIDTH = 24


def is_terminal(stream: object) -> bool:
    """Return whether a stream is a terminal with rewritable lines; false if it is None, closed or lacks `isatty`."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        return False


def is_watched() -> bool:
    """Return whether standard output is a terminal or a notebook cell."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return is_terminal(sys.stdout) or getattr(shell, "kernel", None) is not None


def bar(share: float) -> str:
    """Return a progress bar of `WIDTH` characters, filled to a fraction from 0 to 1; larger values count as 1.

    Example:
        >>> bar(0.5)
        '████████████░░░░░░░░░░░░'
    """
    filled = min(WIDTH, round(WIDTH * share))
    return "█" * filled + "░" * (WIDTH - filled)
