"""Every error a user can cause, under one base.

Each message is one sentence that names the field, quotes the value that was given and says what to do instead.
Broken invariants of Shardscope itself are `assert`s, never one of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any

from shardscope.elsewhere import meant

_QUOTED = 80
"""Characters of a value that a message quotes."""
_QUOTED_BITS = 256
"""Bits of an integer that a message writes out."""
_ITEMS = 8
"""Items of a collection that a message quotes."""
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("{", "}"),
}


class ShardscopeError(ValueError):
    """Base of all errors that the user can mend."""


class SpecError(ShardscopeError):
    """The job as described cannot exist; raised before any process starts."""


class DataError(ShardscopeError):
    """The data named by the job is missing, unreadable or of the wrong shape."""


class LaunchError(ShardscopeError):
    """The ranks could not be started."""


class UntrustedCode(LaunchError):
    """A job carries code from a file, and nobody has said that it is to be trusted."""


class RunNotFound(ShardscopeError):
    """No run directory with this name or path."""


class RunUnreadable(RunNotFound):
    """A run directory is there, but is damaged, incomplete or private to another user."""


class CheckpointError(ShardscopeError):
    """A checkpoint is missing, damaged or belongs to another model."""


class StudyError(ShardscopeError):
    """A study cannot be created or resumed: its storage is unreachable, or holds another study."""


class RunFailed(ShardscopeError):
    """A rank failed: says which, at which step, under which strategy, and carries its traceback.

    Attributes:
        rank: The rank that failed first, or None when the failure was outside the ranks (the agent).
        step: The step it was on, 1-based; 0 before the first; None if unknown.
        strategy: Name of the strategy, for example ``"ring"``.
        traceback: The rank's own traceback, as text; empty if it left none.
    """

    def __init__(
        self, message: str, *, rank: int | None, step: int | None, strategy: str | None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.strategy = strategy
        self.traceback = traceback

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n\n{self.traceback.rstrip()}" if self.traceback else message


def unknown_name(field: str, value: object, valid: Iterable[str]) -> SpecError:
    """The error for a name that is not in a catalogue; names the one that is meant, or nearest, and lists the rest."""
    names = sorted(valid)
    text = value if isinstance(value, str) else quoted(value)
    text = text[:_QUOTED]
    hint = meant(field.rpartition(" ")[2], text, names)
    if hint is None:
        near = [name for name in names if name.lower() == text.lower()]
        for spelt in (text, text.lower()):  # Gb is near Gbit/s, and not GB/s
            near = near or get_close_matches(spelt, names, n=1, cutoff=0.4)
        hint = repr(near[0]) if near else ""
    told = f"did you mean {hint}? " if hint.startswith(("'", "compression=")) else f"{hint}; " * bool(hint)
    return SpecError(f"{field}={quoted(value)} is not known; {told}valid are {', '.join(names)}")


def require(value: object, kind: type, *, by: str, write: str) -> None:
    """Refuse an argument of another type.

    Args:
        value: What was given.
        kind: What it must be.
        by: The function that takes it.
        write: What to write instead.

    Raises:
        SpecError: It is not of that type.
    """
    if not isinstance(value, kind):
        raise SpecError(f"{by} takes a {kind.__name__}, got {quoted(value)}; write {write}")


def quoted(value: object) -> str:
    """A value as a message quotes it: its repr, at most 80 characters long, whatever it is.

    Collections are cut before they are written out, and an object whose ``__repr__`` fails is named by its type.

    Example:
        >>> quoted("ring"), quoted([1, 2]), quoted(10**400)
        ("'ring'", '[1, 2]', '<an integer of 1329 bits>')
    """
    text = _written(value, depth=3)
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 4]} ..."


def _written(value: object, depth: int) -> str:
    kind = type(value)
    if isinstance(value, int) and value.bit_length() > _QUOTED_BITS:
        return f"<an integer of {value.bit_length()} bits>"
    if isinstance(value, str | bytes) and kind in (str, bytes):
        return repr(value[: 2 * _QUOTED])
    if kind in _BRACKETS:
        opening, closing = _BRACKETS[kind]
        return f"{opening}{_items(value, depth)}{closing}"
    try:
        return repr(value)[: 2 * _QUOTED]
    except Exception:  # noqa: BLE001 - a user's own __repr__ may raise anything
        return f"<{kind.__name__}>"


def _items(values: Any, depth: int) -> str:
    if depth == 0:
        return "..." if values else ""
    texts = [
        f"{_written(item, depth - 1)}: {_written(values[item], depth - 1)}"
        if isinstance(values, dict)
        else _written(item, depth - 1)
        for item in islice(values, _ITEMS)
    ]
    return ", ".join([*texts, "..."] if len(values) > _ITEMS else texts)
