"""A bar of characters that fills as a run or a study goes on, and whether it can be rewritten where it stands."""

from __future__ import annotations

WIDTH = 24


def is_terminal(stream: object) -> bool:
    """Whether lines of a stream can be rewritten; one that does not say, is closed or is None is not a terminal."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        return False


def bar(share: float) -> str:
    """The bar at a share of the whole, which may be more than all.

    Example:
        >>> bar(0.5)
        '████████████░░░░░░░░░░░░'
    """
    filled = min(WIDTH, round(WIDTH * share))
    return "█" * filled + "░" * (WIDTH - filled)
