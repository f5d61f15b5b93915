"""Values that no field expects, and mutations that put them anywhere into a description."""

from __future__ import annotations

import copy
import random
from typing import Any


class FailingRepr:
    """An object whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class EndlessRepr:
    """An object whose repr calls itself for ever."""

    def __repr__(self) -> str:
        return f"<{self!r}>"


class LongRepr:
    """An object with a repr of megabytes."""

    def __repr__(self) -> str:
        return "x" * 5_000_000


IN_JSON: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 10**9, 2 * 10**9, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64,
    10**30, 10**400, 0.0, -0.0, 0.5, 1e-9, 1e-300, 5e-324, 1e300, 1.7976931348623157e308, float("nan"), float("inf"),
    float("-inf"), "", " ", "1", "-1", "ring", "ring:2", "ring:²", "pipeline", "pipeline:zbv", "zero-3", "adamw",
    "lamb", "no", "yes", "nan", "inf", "off", "1e999", "x" * 10_000, "a\x00b", "\ud800", "../../etc/passwd", "/" * 5000,
    "~root", "<script>alert(1)</script>", "{}", "null", "𝟙", "10 GB/s", "1e400 GB/s", "5 us",
    [], [[]], [None], {}, {"name": []}, {"name": None}, {"name": "ring", "directions": 10**30}, {"name": {}}, [1, 2],
    [float("nan")], [1] * 1000,
    {"a": {"b": {"c": []}}},
)  # fmt: skip
"""What JSON can hold, in Python's reading of it."""
IN_PYTHON: tuple[Any, ...] = (
    FailingRepr(), EndlessRepr(), LongRepr(), object(), int, len, b"bytes", {1, 2}, (1,),
    (10**400, 1), (1, 10**400, "log"), (1e-3, 1e-1, "log"), (0, 1), (1, 64, "log2"), (3, 5, "log2"),
    (float("nan"), 1), range(3), {1: 2}, {None: None},
    {("a",): 1}, 1j, Ellipsis, lambda: None, bytearray(3),
)  # fmt: skip
"""What only Python can hand over."""


def mutated(source: random.Random, description: Any, *, times: int, values: tuple[Any, ...]) -> Any:
    """A copy in which so many random places hold something else, are gone, or are new."""
    description = copy.deepcopy(description)
    for _ in range(times):
        holder, key = source.choice(list(_places(description)) or [(None, None)])
        if holder is None or source.random() < 0.02:
            return copy.deepcopy(source.choice(values))
        action = source.random()
        if action < 0.75:
            holder[key] = copy.deepcopy(source.choice(values))
        elif action < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[source.choice(("extra", "kind", "name", "steps", str(key) + "s", ""))] = copy.deepcopy(
                source.choice(values)
            )
    return description


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)
