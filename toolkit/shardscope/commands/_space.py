"""Parser for search spaces that are given as ``--space NAME=RANGE`` on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.errors import SpecError
from shardscope.foreign_file import parsed_json


def read_space(options: Sequence[str]) -> dict[str, Any] | None:
    """Parse the values of ``--space`` into the parameters of a `Space`; return None if there are no values.

    Raises:
        SpecError: A value does not have the form NAME=RANGE, or a name is given twice.

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
    """Parse a range into an interval if it contains a colon, else into a list of choices.

    Strategies are always parsed as choices, because their names may contain colons.
    """
    if ":" not in text or name == "strategy":
        values = [_value(part) for part in text.split(",")]
        if len(values) < 2:
            raise SpecError(
                f"--space {option!r} has only one choice; write {name}=LOW:HIGH, or several choices separated by commas"
            )
        return values
    low, high, *log = text.split(":")
    ends = [_value(low), _value(high)]
    if log not in ([], ["log"]) or not all(isinstance(end, int | float) for end in ends):
        raise SpecError(
            f"--space {option!r} is not a valid interval; write {name}=LOW:HIGH or {name}=LOW:HIGH:log"
        )
    if name != "batch":
        return (*ends, *log)

    from shardscope.spec.space import PowersOfTwo

    return PowersOfTwo(low=ends[0], high=ends[1])


def _value(text: str) -> Any:
    """Parse a JSON value, or return the text itself."""
    try:
        return parsed_json(text)
    except ValueError:
        return text
