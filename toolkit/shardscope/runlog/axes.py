"""Names of collectives on one axis of a job's ranks, as counters, spans and predictions use them: ``data:all_reduce``.

In a job whose ranks have one axis, collectives have no axis in their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

EXPERT_DATA = "expert-data"
"""Name of the axis of data ranks that hold the same experts."""
_HYPHENATED = {
    name.replace("-", " "): name for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
}
TOKENS = "expert:all_to_all"
"""Name of the all-to-alls that send tokens to the experts of other ranks and back."""


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


def collective_text(name: str) -> str:
    """Return the name of a collective or another activity for people.

    Example:
        >>> collective_text("data:ring_reduce_scatter")
        'data: ring reduce-scatter'
    """
    axis, text = axis_of(name), collective_of(name).replace("_", " ")
    for plain, hyphenated in _HYPHENATED.items():
        text = text.replace(plain, hyphenated)
    return text if axis is None else f"{axis}: {text}"


def axis_groups(shape: Mapping[str, int], axis: str) -> list[list[int]]:
    """Return the groups of ranks along an axis of a mesh, in the order of their first ranks.

    Context ranks exchange gradients as data ranks do, so they belong to the groups of the data axis.

    Args:
        shape: Number of ranks along each axis, the outermost axis first.
        axis: One of the axes.

    Example:
        >>> axis_groups({"data": 2, "tensor": 2}, "data")
        [[0, 2], [1, 3]]
    """
    if axis == "data" and "context" in shape:
        shape = {
            name: size * (shape["context"] if name == axis else 1)
            for name, size in shape.items()
            if name != "context"
        }
    sizes, place = [*shape.values()], [*shape].index(axis)
    size, stride = sizes[place], prod(sizes[place + 1 :])
    starts = (rank for rank in range(prod(sizes)) if rank // stride % size == 0)
    return [[start + stride * index for index in range(size)] for start in starts]
