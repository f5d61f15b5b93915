"""Names of collectives on one axis of a job's ranks, as counters, spans and predictions use them: ``data:all_reduce``.

In a job whose ranks have one axis, collectives have no axis in their names.
"""

from __future__ import annotations


def on_axis(axis: str, name: str) -> str:
    """Return the name of a collective on an axis.

    Example:
        >>> on_axis("tensor", "all_reduce")
        'tensor:all_reduce'
    """
    return f"{axis}:{name}"


def axis_of(name: str) -> str | None:
    """Return the axis in a collective's name; None if it has none."""
    axis, colon, _ = name.partition(":")
    return axis if colon else None


def collective_of(name: str) -> str:
    """Return a collective's name without its axis."""
    return name.rpartition(":")[2]
