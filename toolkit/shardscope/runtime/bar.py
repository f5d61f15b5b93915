"""A text progress bar for runs and studies, and a check whether it can be rewritten in place."""

from __future__ import annotations

WIDTH = 24


def is_terminal(stream: object) -> bool:
    """Whether a stream is a terminal, whose lines can be rewritten; false if it is None, closed or lacks `isatty`."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        return False


def bar(share: float) -> str:
    """Return the bar at a share of the whole, which may exceed 1.

    Example:
        >>> bar(0.5)
        '████████████░░░░░░░░░░░░'
    """
    filled = min(WIDTH, round(WIDTH * share))
    return "█" * filled + "░" * (WIDTH - filled)
