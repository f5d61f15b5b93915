"""All errors that a user can cause, derived from one base class.

Each message is one sentence that names the field, quotes the given value and states what to do instead.
Broken invariants of Shardscope itself are assertions, never one of these errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any

from shardscope.aliases import meant

_QUOTED = 80
"""Maximum number of characters of a value quoted in a message."""
_QUOTED_BITS = 256
"""Maximum size, in bits, of an integer that a message shows with all its digits."""
_MESSAGE = 1500
"""Maximum number of characters of a message."""
_ENDING = 400
"""Number of characters kept at the end of a truncated message, which gives advice."""
_ITEMS = 8
"""Maximum number of items of a collection quoted in a message."""
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("{", "}"),
}


class ShardscopeError(ValueError):
    """Base class of all errors that the user can fix. The middle of a very long message is elided."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_shortened(each) if isinstance(each, str) else each for each in args))


class SpecError(ShardscopeError):
    """A job, another spec such as a cluster, or an argument is invalid; raised before any process starts."""


class DataError(ShardscopeError):
    """The data named by the job is missing, unreadable or of the wrong shape."""


class LaunchError(ShardscopeError):
    """The ranks could not be started."""


class UntrustedCode(LaunchError):
    """A job's code would be loaded from a file, but the caller has not declared that file trusted."""


class RunNotFound(ShardscopeError):
    """No run directory has the given name or path."""


class RunUnreadable(RunNotFound):
    """A run directory exists, but it is corrupt, incomplete or private to another user."""


class CheckpointError(ShardscopeError):
    """A checkpoint is missing, corrupt or belongs to another model."""


class StudyError(ShardscopeError):
    """A study cannot be created or resumed: its storage is unreachable, or contains a different study."""


class RunFailed(ShardscopeError):
    """A run failed. The error gives the failed rank, its step, the strategy and the rank's traceback.

    Attributes:
        rank: The rank that failed first; None if the failure was outside the ranks (in the agent).
        step: Step of that rank at the failure, 1-based; 0 before the first step; None if unknown.
        strategy: Name of the strategy, for example ``"ring"``.
        traceback: The rank's own traceback, as text; empty if there is none.
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
    """Return the error for a name that is not in a catalogue.

    The message suggests the equivalent of another library's name, or the closest valid name, and lists all valid names.
    """
    names = sorted(valid)
    text = value if isinstance(value, str) else quoted(value)
    text = text[:_QUOTED]
    hint = meant(field.rpartition(" ")[2], text, names)
    if hint is None:
        near = [name for name in names if name.lower() == text.lower()]
        for spelt in (text, text.lower()):  # Gb must suggest Gbit/s and not GB/s
            near = near or get_close_matches(spelt, names, n=1, cutoff=0.4)
        hint = repr(near[0]) if near else ""
    told = f"did you mean {hint}? " if hint.startswith(("'", "compression=")) else f"{hint}; " * bool(hint)
    return SpecError(f"{field}={quoted(value)} is not known; {told}valid names are {', '.join(names)}")


def require(value: object, kind: type, *, by: str, write: str) -> None:
    """Check the type of an argument.

    Args:
        value: The argument to check.
        kind: The required type.
        by: Name of the function to which the argument was passed.
        write: Correct code, which the error message recommends.

    Raises:
        SpecError: The argument is not of that type.
    """
    if not isinstance(value, kind):
        raise SpecError(f"{by} takes a {kind.__name__}, got {quoted(value)}; write {write}")


def _shortened(message: str) -> str:
    if len(message) <= _MESSAGE:
        return message
    kept = (
        len(message) - message.rfind("; ") if "; " in message else 0
    )  # what to do follows the last semicolon
    kept = min(max(kept, _ENDING), _MESSAGE - _ENDING)
    return f"{message[: _MESSAGE - kept - 5]} ... {message[-kept:]}"


def quoted(value: object) -> str:
    """Return the repr of a value for an error message, truncated to 80 characters.

    Collections are truncated before their items are formatted. If the ``__repr__`` of an object raises an error, the
    name of its type is returned instead.

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
