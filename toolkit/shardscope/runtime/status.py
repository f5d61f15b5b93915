"""How a run stands, as `status.json` says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardscope.errors import RunUnreadable
from shardscope.runtime.event_schema import is_real, is_whole
from shardscope.runtime.processes import ProcessStart

FINAL_STATES = frozenset({"completed", "stopped", "failed"})
STATES = FINAL_STATES | {"starting", "running"}
_MOST_PID = 2**31 - 1


@dataclass(frozen=True)
class Status:
    """What `status.json` says. `pid` and `process_started` identify the process that looks after the run."""

    state: str
    pid: int
    process_started: ProcessStart
    t: float
    host: str = ""
    detached: bool = False
    reason: str | None = None
    error: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, value: Any) -> Self:
        """The status in a JSON value. What another version has added to it is left out.

        Raises:
            RunUnreadable: The value does not say how a run stands.
        """
        if not isinstance(value, dict) or value.get("state") not in [*STATES]:
            raise RunUnreadable("status.json does not say how the run stands")
        started = value.get("process_started")
        is_process = is_whole(value.get("pid"), _MOST_PID) and (isinstance(started, str) or is_real(started))
        if not is_process or not is_real(value.get("t")):
            raise RunUnreadable("status.json does not say which process looks after the run")
        return cls(
            value["state"], value["pid"], value["process_started"], value["t"], _text(value.get("host")) or "",
            value.get("detached") is True, _text(value.get("reason")), _error(value.get("error")),
        )  # fmt: skip


def _text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None


def _error(value: Any) -> dict[str, Any] | None:
    """The error of a failed run in the form that `RunFailed` takes; None for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("message"), str):
        return None
    numbers = {key: value[key] for key in ("rank", "step") if is_whole(value.get(key))}
    keys = ("message", "strategy", "traceback", "type")
    return {**numbers, **{key: printable(value[key]) for key in keys if isinstance(value.get(key), str)}}


def printable(text: str) -> str:
    """The text with all that a terminal would obey, or that cannot be encoded, written as an escape sequence."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
