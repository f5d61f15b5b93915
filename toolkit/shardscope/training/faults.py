"""Injects one rank's faults from a fault plan: kills processes, slows computation, fills the disk.

Each fault is claimed by a file in the run directory before it is carried out, so that it happens once, and not again
when a restarted run repeats its step. An event is written first, because a killed process writes nothing more. If an
elastic run does not have the rank of a fault when it is due, rank 0 writes an event that says so, and claims the fault.

    control/faults/began      when the ranks began their first step, by the clock of the run (see `runlog.clock`)
    control/faults/N          fault number N of the plan has been carried out
    control/faults/N.link     the agent of the emulated cluster is asked to drop the link of fault N
    control/faults/N.done     the agent has dropped the link
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedWriter
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from shardscope.errors import LaunchError
from shardscope.runlog import clock
from shardscope.runlog.writer import EventWriter
from shardscope.spec.fault_kinds import AnyFault, DropLink, FillDisk, Kill, Slow
from shardscope.spec.faults import Faults
from shardscope.spec.units import plural
from shardscope.training.compute_pace import ComputePace

_FULL = "/dev/full"
"""Linux's device that has no space left: every write to it fails with ENOSPC."""
_PATIENCE_S, _POLL_S = 5.0, 1e-3
"""Maximum wait for the agent of the emulated cluster, and interval between checks, in seconds."""
_BEGAN = "began"
_EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class RankPlace(NamedTuple):
    """Placement of a rank."""

    rank: int
    node: int
    is_first: bool
    """Whether this rank is the first of its node, which carries out the node's faults."""
    world_size: int
    """Current number of ranks; an elastic job's plan may name ranks beyond it."""

    @classmethod
    def from_env(cls, env: Mapping[str, str], node: int | None = None) -> RankPlace:
        """Return the place that elastic's environment variables describe; `node` is for an emulated cluster."""
        own = int(env.get("GROUP_RANK", "0")) if node is None else node
        is_first = int(env.get("LOCAL_RANK", "0")) == 0
        return cls(int(env["RANK"]), own, is_first, int(env["WORLD_SIZE"]))


@dataclass
class RankFaults:
    """The faults of one rank.

    Attributes:
        plan: All faults of the run.
        place: Placement of this rank.
        folder: The run's folder for claims, ``control/faults``.
        events: Writer for this rank's event log.
        grown: Called before each step; returns the plan if faults were added to it, else None.
    """

    plan: Faults
    place: RankPlace
    folder: Path
    events: EventWriter
    grown: Callable[[], Faults | None] = lambda: None
    pace: ComputePace | None = None
    """Paces this rank's computation."""
    make_pace: Callable[[], ComputePace] | None = None
    """Makes `pace` once the rank is to compute slowly; needed if `pace` is None and there are such faults."""
    _own: list[tuple[int, AnyFault]] = field(init=False)
    _has_begun: bool = field(default=False, init=False)
    _over: set[int] = field(default_factory=set, init=False)
    """Numbers of the faults that are known to have been claimed."""

    _step: int = field(default=0, init=False)
    """The step that this rank takes; 0 during setup."""

    def __post_init__(self) -> None:
        self._own = self._from(0)
        if (self.folder / _BEGAN).exists():  # a restart is no shelter from a failure at a time
            self._begin()

    def _from(self, first: int) -> list[tuple[int, AnyFault]]:
        """Return this rank's faults from number `first` on, with their numbers."""
        own = [each for each in enumerate(self.plan) if each[0] >= first and self._is_own(each[1])]
        if any(isinstance(fault, FillDisk) for _, fault in own) and not Path(_FULL).exists():
            raise LaunchError(f"fill_disk needs {_FULL}, which only Linux has; leave it out")
        return own

    def _is_own(self, fault: AnyFault) -> bool:
        if isinstance(fault, DropLink):
            return self.place.is_first and self.place.node == fault.nodes[0]
        if self._is_absent(fault):
            return self.place.rank == 0
        if isinstance(fault, FillDisk) or fault.rank is not None:
            return fault.rank == self.place.rank
        return fault.node == self.place.node and (self.place.is_first or isinstance(fault, Slow))

    def _is_absent(self, fault: AnyFault) -> bool:
        """Return whether the run currently lacks the rank that a fault names."""
        return not isinstance(fault, DropLink) and (fault.rank or 0) >= self.place.world_size

    def before_step(self, step: int) -> None:
        """Carry out the faults that are due before `step`; does not return if one of them kills this process."""
        plan = self.grown()
        if plan is not None:
            num_known, self.plan = len(self.plan), plan
            self._own += [(number, _not_before(fault, step)) for number, fault in self._from(num_known)]
        if not self._own:
            return
        self._step = step
        if not self._has_begun:
            self._begin()
        self._set_pace(step)
        for number, fault in self._own:
            if self._is_absent(fault):
                if step >= (_first_step(fault) or math.inf):
                    self._leave_out(number, fault, step)
            elif isinstance(fault, Kill | DropLink) and fault.step == step and not _is_while_saving(fault):
                is_asked_for = self._carry_out(number, fault, step)
                if is_asked_for:
                    self._wait_for(self.folder / f"{number}.done")

    def _set_pace(self, step: int) -> None:
        """Slow this rank's computation in `step` by the product of the factors of its faults."""
        factor = 1.0
        for number, fault in self._own:
            if isinstance(fault, Slow) and fault.is_on(step) and not self._is_absent(fault):
                factor *= fault.factor
                self._claim(number, fault, step)
        if self.pace is None and self.make_pace is not None and factor > 1:
            self.pace = self.make_pace()
        if self.pace is not None:
            self.pace.factor = factor

    def checkpoint_file(self, file: BufferedWriter, step: int) -> BufferedWriter:
        """Return the file for this rank's part of the checkpoint of `step`: `file`, or a wrapper with a due fault."""
        for number, fault in self._own:
            is_due = (isinstance(fault, FillDisk) or _is_while_saving(fault)) and not self._is_absent(fault)
            if not (is_due and step >= (fault.step or 0) and self._claim(number, fault, step)):  # type: ignore[union-attr]
                continue
            if isinstance(fault, Kill):
                return cast("BufferedWriter", _DeadlyFile(file))
            full = os.open(_FULL, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(full, file.fileno(), inheritable=False)
            os.close(full)
        return file

    def _begin(self) -> None:
        """Record when the run began, unless already recorded, and start to wait for faults that are due at a time."""
        self._has_begun = True
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        timed = [
            (fault.at_s, number, fault)
            for number, fault in self._own
            if isinstance(fault, Kill | DropLink) and fault.at_s is not None
        ]
        if timed:
            timed.sort(key=lambda each: each[:2])
            began = self._began()
            threading.Thread(
                target=self._at_their_times, args=(began, timed), name="timed-faults", daemon=True
            ).start()

    def _at_their_times(self, began: float, timed: Sequence[tuple[float, int, Kill | DropLink]]) -> None:
        for at_s, number, fault in timed:
            time.sleep(max(0.0, began + at_s - clock.now()))
            self._carry_out(number, fault, self._step)

    def _began(self) -> float:
        path = self.folder / _BEGAN
        with suppress(FileExistsError):
            file = os.open(path, _EXCLUSIVE, 0o600)
            os.write(file, b"%.6f" % clock.now())
            os.close(file)
        with suppress(ValueError):  # another rank has created the file, but not written it yet
            return float(path.read_text())
        return clock.now()

    def _leave_out(self, number: int, fault: AnyFault, step: int) -> None:
        why = f"not carried out, because the run has {plural(self.place.world_size, 'rank')}"
        self._claim(number, fault, step, kind="left-out", text=f"{fault.text}: {why}")

    def _carry_out(self, number: int, fault: Kill | DropLink, step: int) -> bool:
        """Carry out a fault if it is unclaimed; return whether the agent was asked to drop a link and has not done so.

        The thread of the timed faults does not wait for the agent, which would delay the next fault.
        """
        if self._is_absent(fault):
            self._leave_out(number, fault, step)
            return False
        if not self._claim(number, fault, step):
            return False
        if isinstance(fault, DropLink):
            os.close(os.open(self.folder / f"{number}.link", _EXCLUSIVE, 0o600))
            return True
        if fault.node is not None:
            agent = parent_process()
            os.kill(os.getppid() if agent is None or agent.pid is None else agent.pid, signal.SIGKILL)
        _die()
        return False

    def _wait_for(self, path: Path) -> None:
        """Wait until a file appears, so that the step begins after the fault."""
        deadline = time.monotonic() + _PATIENCE_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _claim(self, number: int, fault: AnyFault, step: int, **told: str) -> bool:
        """Claim a fault and write its event; return False if it was claimed before.

        Args:
            number: Number of the fault in the plan.
            fault: The fault.
            step: The step.
            **told: Fields of the event that differ from the fields for an injected fault.
        """
        if number in self._over:
            return False
        self._over.add(number)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.close(os.open(self.folder / str(number), _EXCLUSIVE, 0o600))
        except FileExistsError:
            return False
        self.events.emit(
            "fault", **{"step": step, "number": number, "kind": fault.kind, "text": fault.text, **told}
        )
        return True


def _first_step(fault: AnyFault) -> int | None:
    """Return the step from which a fault is due; None if it is due at a time."""
    return fault.steps[0] if isinstance(fault, Slow) else fault.step


def _not_before(fault: AnyFault, step: int) -> AnyFault:
    """Return a fault that was added before `step`, postponed to `step` if its own step has passed."""
    if isinstance(fault, Slow):
        first, last = fault.steps
        late = max(0, step - first)
        return fault.replace(steps=(first + late, None if last is None else last + late))
    if isinstance(fault, Kill | DropLink) and fault.step is not None:
        return fault.replace(step=max(fault.step, step))
    return fault


def _is_while_saving(fault: AnyFault) -> bool:
    return isinstance(fault, Kill) and fault.during == "checkpoint"


class _DeadlyFile:
    """A file that kills this process at the first write, after half of the data, or at the last flush."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data[: len(data) // 2])
        self.flush()
        raise AssertionError("unreachable")

    def flush(self) -> None:
        self._file.flush()
        _die()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal arrives within microseconds, but not necessarily before this thread goes on


class FaultyControl:
    """A `Control` of the trainer that carries out faults before each step.

    Args:
        should_stop: Function that says whether to stop before a step.
        faults: The rank's faults.
    """

    def __init__(self, should_stop: Callable[[int], bool], faults: RankFaults) -> None:
        self._should_stop, self._faults = should_stop, faults

    def should_stop(self, step: int) -> bool:
        """Return whether to stop before `step`."""
        if self._should_stop(step):
            return True
        self._faults.before_step(step)
        return False
