"""The status of a run, `status.json`: its state and the cause of its end. It is validated when it is read, because it
may be corrupt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self

from shardscope.errors import RunUnreadable
from shardscope.runlog.files import is_real, is_whole
from shardscope.runtime.record.processes import ProcessStart
from shardscope.spec.units import plural

FINAL_STATES = frozenset({"completed", "stopped", "failed"})
STATES = FINAL_STATES | {"starting", "running"}
_MOST_PID = 2**31 - 1
_BLOCK = 4096
"""Usual block size of a file system, in bytes; every status.json occupies at least one block."""


class Cause(StrEnum):
    """Cause that ended a run before its last step, other than an error in one of its ranks."""

    REQUESTED = "requested"
    """A stop of the run was requested."""
    KILLED = "killed"
    """A signal killed a rank, the agent or the launch server of the run."""
    NOT_STARTED = "not-started"
    """The ranks could not be started."""
    TERMINATED = "terminated"
    """The agent of the run received SIGTERM."""
    DRIVER_ENDED = "driver-ended"
    """The program that launched the run has ended."""
    DIRECTORY_GONE = "directory-gone"
    """The run directory was deleted or moved."""
    RECORDING_STOPPED = "recording-stopped"
    """`observe` stopped recording on a rank before the training loop ended; the training continued."""


@dataclass(frozen=True)
class Status:
    """Content of `status.json`. `pid` and `process_started` identify the process in charge of the run.

    `cause` is None for a run that completed or failed by itself, and for runs from versions that did not record it.
    `restarts` is the number of times the ranks have been restarted after a failure.
    """

    state: str
    pid: int
    process_started: ProcessStart
    t: float
    host: str = ""
    detached: bool = False
    reason: str | None = None
    error: Mapping[str, Any] | None = None
    cause: Cause | None = None
    restarts: int = 0

    @property
    def text(self) -> str:
        """The state as text, with the number of restarts: ``completed after 2 restarts``."""
        return state_text(self.state, self.restarts, self.cause)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the status in a parsed JSON value. Unknown fields, added by other versions, are ignored.

        Raises:
            RunUnreadable: The value is not a valid status.
        """
        if not isinstance(value, dict) or value.get("state") not in [*STATES]:
            raise RunUnreadable("status.json does not contain a valid state")
        started = value.get("process_started")
        is_process = is_whole(value.get("pid"), _MOST_PID) and (isinstance(started, str) or is_real(started))
        if not is_process or not is_real(value.get("t")):
            raise RunUnreadable("status.json does not identify the process in charge of the run")
        return cls(
            value["state"], value["pid"], value["process_started"], value["t"], _text(value.get("host")) or "",
            value.get("detached") is True, _text(value.get("reason")), _error(value.get("error")),
            _cause(value.get("cause")), value["restarts"] if is_whole(value.get("restarts")) else 0,
        )  # fmt: skip


def in_one_block(status: Status) -> bytes:
    """Return a status as JSON that fits in a block: without a traceback, and with a truncated message if necessary."""
    error = None if status.error is None else {**status.error, "traceback": ""}
    kept: str = "" if error is None else error["message"]
    while len(content := json.dumps(asdict(replace(status, error=error)))) > _BLOCK and error and kept:
        kept = kept[: len(kept) * 3 // 4]
        error["message"] = f"{kept}..."
    return content.encode()


def state_text(state: str, restarts: int, cause: str | None = None) -> str:
    """Return the state of a run as text: ``completed``, ``completed after 2 restarts`` or ``recording stopped``."""
    if cause == Cause.RECORDING_STOPPED:
        return "recording stopped"
    return f"{state} after {plural(restarts, 'restart')}" if restarts else state


def _text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None


def _cause(value: Any) -> Cause | None:
    """Return the cause with the name `value`; None if this version defines no such cause."""
    return Cause(value) if value in [*Cause] else None


def _error(value: Any) -> dict[str, Any] | None:
    """Return the error in `value` as arguments for `RunFailed`; None if `value` does not describe an error."""
    if not isinstance(value, dict) or not isinstance(value.get("message"), str):
        return None
    numbers = {key: value[key] for key in ("rank", "step") if is_whole(value.get(key))}
    keys = ("message", "strategy", "traceback", "type")
    return {**numbers, **{key: printable(value[key]) for key in keys if isinstance(value.get(key), str)}}


def printable(text: str) -> str:
    """Return the text with unprintable characters, such as terminal control characters, as escape sequences."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
