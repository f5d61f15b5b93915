"""Every error a user can cause, under one base.

Each message is one sentence that names the field, quotes the value that was given and says what to do instead.
Broken invariants of Shardscope itself are `assert`s, never one of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from shardscope.elsewhere import meant


class ShardscopeError(ValueError):
    """Base of all errors that the user can mend."""


class SpecError(ShardscopeError):
    """The job as described cannot exist; raised before any process starts."""


class DataError(ShardscopeError):
    """The data named by the job is missing, unreadable or of the wrong shape."""


class LaunchError(ShardscopeError):
    """The ranks could not be started."""


class RunNotFound(ShardscopeError):
    """No run directory with this name or path."""


class CheckpointError(ShardscopeError):
    """A checkpoint is missing, damaged or belongs to another model."""


class StudyError(ShardscopeError):
    """A study cannot be begun or gone on with: its storage is away, or it is about something else."""


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
    hint = meant(field.rpartition(" ")[2], str(value), names)
    if hint is None:
        text = str(value)
        near = [name for name in names if name.lower() == text.lower()]
        for spelt in (text, text.lower()):  # Gb is near Gbit/s, and not GB/s
            near = near or get_close_matches(spelt, names, n=1, cutoff=0.4)
        hint = repr(near[0]) if near else ""
    told = f"did you mean {hint}? " if hint.startswith(("'", "compression=")) else f"{hint}; " * bool(hint)
    return SpecError(f"{field}={value!r} is not known; {told}valid are {', '.join(names)}")
