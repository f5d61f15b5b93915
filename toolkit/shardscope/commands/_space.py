"""Search spaces in the syntax of the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shardscope.errors import SpecError


def read_space(options: Sequence[str]) -> dict[str, Any] | None:
    """Parse options ``--space NAME=RANGE`` to the parameters of a `Space`; return None if there are no options.

    Raises:
        SpecError: An option has another form, or a name is given twice.

    Example:
        >>> read_space(["optimizer=adamw,lamb", "optimizer.lr=1e-4:1e-1:log"])
        {'optimizer': ['adamw', 'lamb'], 'optimizer.lr': (0.0001, 0.1, 'log')}
    """
    space: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not (name and equals and text):
            raise SpecError(
                f"--space {option!r} is not NAME=RANGE; write for example optimizer.lr=1e-4:1e-1:log or "
                "optimizer=adamw,lamb"
            )
        if name in space:
            raise SpecError(f"--space names {name!r} twice; name it once")
        space[name] = _parameter(name, text, option)
    return space or None


def _parameter(name: str, text: str, option: str) -> Any:
    """Parse a range: an interval if it has a colon, else choices.

    Strategies are always choices, as their names may have colons.
    """
    if ":" not in text or name == "strategy":
        values = [_value(part) for part in text.split(",")]
        if len(values) < 2:
            raise SpecError(
                f"--space {option!r} leaves nothing to search; write {name}=LOW:HIGH, or choices separated by commas"
            )
        return values
    low, high, *log = text.split(":")
    ends = [_value(low), _value(high)]
    if log not in ([], ["log"]) or not all(isinstance(end, int | float) for end in ends):
        raise SpecError(
            f"--space {option!r} is not an interval; write {name}=LOW:HIGH or {name}=LOW:HIGH:log"
        )
    if name != "batch":
        return (*ends, *log)

    from shardscope.spec.space import PowersOfTwo

    return PowersOfTwo(low=ends[0], high=ends[1])


def _value(text: str) -> Any:
    """Parse a JSON value, or return the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
