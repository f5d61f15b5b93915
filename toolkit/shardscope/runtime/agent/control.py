"""Stop all ranks after the same step. Each step costs only one check for a file; rank 0 checks one or two more.

A stop request is a file in the run directory. Rank 0 sees it before some step, writes a note that this step is the
last, and only then takes part in the step. A synchronous step cannot end on any rank before rank 0 has taken part in
it, so every other rank finds the note before the next step. If other ranks can be up to n steps ahead, the last step is
n steps later. If they can be any number of steps ahead, each rank stops as soon as it sees the request; such a strategy
synchronises its ranks afterwards.

A request for another number of ranks ends the ranks in the same way: they save their state, and the agent starts the
requested number of ranks, which continue from this state.

On one machine the note is a file. Ranks on several machines share the directory over a network, whose clients may cache
that a file does not exist, so there the note goes through the process group's store.

A gated run may be stopped after each evaluation. If its ranks did not wait, they would waste one or more steps before
each decision arrived. So after an evaluation, synchronous ranks wait: rank 0 for the process that decides, the others
for rank 0. They wait no longer than a step takes, and not at all after two consecutive late decisions. In the worst
case, if every decision arrives just in time, the waiting costs one step time per evaluation; if no decision ever
arrives, it costs two step times in total.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardscope.errors import RunUnreadable, ShardscopeError
from shardscope.runlog.files import OutOfReach, read_text
from shardscope.runtime.record.rundir import RunDir

_MOST_LATE = 2
"""Number of consecutive late decisions after which ranks stop waiting."""
_SOON_S, _SOON_EVERY_S, _LATER_EVERY_S = 20e-3, 3e-4, 2e-3
"""Polling times in seconds: length of the initial period, interval in this period, interval afterwards. Ranks may
continue up to one interval apart; those that continue first wait for the others in the next step."""
_PATIENCE_S = 5.0
"""Maximum time for which opening an existing file is retried, in seconds."""


class NoVerdictError(ShardscopeError):
    """Rank 0 has not reported whether to continue after an evaluation."""


class Notes(Protocol):
    """Step numbers that rank 0 publishes to the other ranks, each under the path of a file in the run directory."""

    def read(self, path: Path) -> int | None:
        """Return the step number that rank 0 has written under `path`; None if it has not written one yet."""

    def write(self, path: Path, step: int) -> None:
        """Publish a step number under `path`: later calls of `read` return it on every rank."""


@dataclass(frozen=True)
class FileNotes:
    """Notes stored as files in the run directory, for ranks on one machine."""

    run: RunDir

    def read(self, path: Path) -> int | None:
        return _step_in(path)

    def write(self, path: Path, step: int) -> None:
        self.run.write_control(path, str(step))


@dataclass(frozen=True)
class StoreNotes:
    """Notes in a `torch.distributed.Store`, for ranks on several machines. Each read is a request to its server."""

    store: Any

    def read(self, path: Path) -> int | None:
        return int(self.store.get(path.name)) if self.store.check([path.name]) else None

    def write(self, path: Path, step: int) -> None:
        self.store.set(path.name, str(step))


@dataclass
class StopControl:
    """One rank's view of external requests: to stop the run, or to continue after an evaluation.

    Attributes:
        run: The run directory.
        rank: This rank.
        world_size: Number of ranks.
        drift: Maximum number of steps by which another rank can be ahead of rank 0; None if unbounded.
        timeout_s: Time that the other ranks wait for rank 0, in addition to the time that rank 0 itself waits for a
            decision, in seconds.
        notes: Channel through which rank 0 passes step numbers to the other ranks; None uses files in the run
            directory.
        is_resizable: Whether the ranks also stop for a resize request, after which an agent starts the requested
            number.
    """

    run: RunDir
    rank: int
    world_size: int
    drift: int | None = 0
    timeout_s: float = 60.0
    notes: Notes | None = None
    is_resizable: bool = False
    _is_gated: bool = field(init=False)
    _late: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._notes: Notes = self.notes or FileNotes(self.run)
        self._is_gated = self.drift == 0 and self.run.approval.exists()

    def should_stop(self, step: int) -> bool:
        """Return whether to stop before `step`. Called by every rank before every step."""
        if self.drift is None:
            return self._is_asked()
        last = self._notes.read(self.run.stop_at)
        if last is not None:
            return step > last
        if self.rank == 0 and self._is_asked():
            if self.world_size == 1:
                return True
            self._notes.write(self.run.stop_at, step + self.drift)
        return False

    def is_resizing(self) -> bool:
        """Return whether, as far as this rank knows, the ranks are stopping for a resize."""
        return self._is_resize_asked() and not self.run.stop_request.exists()

    def _is_asked(self) -> bool:
        return self.run.stop_request.exists() or self._is_resize_asked()

    def _is_resize_asked(self) -> bool:
        return self.is_resizable and self.run.resize_request.exists()

    def evaluated(self, step: int, patience_s: float) -> None:
        """Wait for the decision on an evaluation, if the run is gated. Called by every rank after every evaluation.

        Args:
            step: The step of the evaluation.
            patience_s: Maximum time to wait for the decision, in seconds.

        Raises:
            NoVerdictError: Rank 0 did not pass on a decision in time.
        """
        if not self._is_gated:
            return
        if self.rank == 0:
            self._hear(step, patience_s if self._late < _MOST_LATE else 0.0)
        elif not _wait(lambda: self._is_answered(step), patience_s + self.timeout_s):
            raise NoVerdictError(
                f"rank 0 has not reported for {patience_s + self.timeout_s:.0f} s after the evaluation at step {step}; "
                f"raise timeout_s, now {self.timeout_s:g}, if rank 0 may need longer"
            )

    def _hear(self, step: int, patience_s: float) -> None:
        """On rank 0, wait for the decision and pass it on to the other ranks."""
        is_told = _wait(lambda: self._is_told(step), patience_s)
        self._late = 0 if is_told else self._late + 1
        answer = self.run.stop_at if self.run.stop_request.exists() else self.run.decision
        self._notes.write(answer, step)

    def _is_told(self, step: int) -> bool:
        return self.run.stop_request.exists() or (_step_in(self.run.approval) or 0) >= step

    def _is_answered(self, step: int) -> bool:
        return (self._notes.read(self.run.decision) or 0) >= step or self._notes.read(
            self.run.stop_at
        ) is not None


def _wait(condition: Callable[[], bool], patience_s: float) -> bool:
    """Wait until the condition holds, up to `patience_s` seconds. Return whether it holds."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > patience_s:
            return False
        time.sleep(_SOON_EVERY_S if waited < _SOON_S else _LATER_EVERY_S)
    return True


def _step_in(path: Path) -> int | None:
    """Return the step number in a file; None if the file does not exist, or does not contain a number.

    If the file exists but cannot be opened, opening is retried: a rank that treated it as missing would continue alone.

    Raises:
        OutOfReach: The file cannot be opened for `_PATIENCE_S` seconds.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return int(read_text(path))
        except OutOfReach:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LATER_EVERY_S)
        except (FileNotFoundError, RunUnreadable, ValueError):
            return None
