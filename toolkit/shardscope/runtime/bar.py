"""A bar of characters that fills as a run or a study goes on."""

from __future__ import annotations

WIDTH = 24


def bar(share: float) -> str:
    """The bar at a share of the whole, which may be more than all.

    Example:
        >>> bar(0.5)
        '████████████░░░░░░░░░░░░'
    """
    filled = min(WIDTH, round(WIDTH * share))
    return "█" * filled + "░" * (WIDTH - filled)
