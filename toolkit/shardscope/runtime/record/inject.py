"""Fault injection into a running run.

`inject` replaces the plan of faults in the run directory by an extended plan. Before a step, at most every 0.1 s, each
rank checks the file's modification time, and reads new faults if the file has changed.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardscope.errors import SpecError
from shardscope.runtime.record.rundir import FAULTS_FILE, RunDir
from shardscope.spec import Job
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.faults import Faults

_EVERY_S = 0.1
"""Minimum time between two checks of the plan, in seconds."""


@dataclass
class PlanWatch:
    """Reader of a run's fault plan that detects changes of the file; each process has its own."""

    run: RunDir
    _seen: int = 0
    _next: float = 0.0

    def __call__(self) -> Faults | None:
        """Return the plan if it is new or has changed since the last call; None if it has not changed, or if there is
        no plan.

        The file is checked at most every `_EVERY_S` seconds, so that most calls cost almost nothing.

        Raises:
            RunUnreadable: The file is corrupt.
        """
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + _EVERY_S
        try:
            seen = (self.run.path / FAULTS_FILE).stat().st_mtime_ns
        except OSError:
            return None
        if seen == self._seen:
            return None
        self._seen = seen
        return self.run.read_faults()


def inject(run: RunDir, job: Job, cluster: EmulatedCluster | None, faults: Faults | str) -> None:
    """Add faults to the plan of a run.

    Args:
        run: The run directory.
        job: The job of the run, on its current number of ranks.
        cluster: The emulated cluster that the run is on; None for this machine itself.
        faults: The faults, or their text.

    Raises:
        SpecError: `faults` is empty, or a fault cannot occur in this run or is at a time instead of a step.
    """
    added = Faults.of(faults)
    if not added:
        raise SpecError("inject needs at least one fault; give for example ss.Faults().kill(rank=1, step=40)")
    added.check(job, cluster)
    for fault in added:
        if getattr(fault, "at_s", None) is not None:
            raise SpecError(
                f"fault '{fault}' occurs at a time, which is counted from the start of the run; give step=... instead"
            )
        rank = getattr(fault, "rank", None)
        if rank is not None and rank >= job.world_size:
            raise SpecError(
                f"fault '{fault}' names rank {rank}, but the run now has ranks 0 to {job.world_size - 1}; give one"
            )
    with _locked(run):
        run.write_faults(Faults(faults=(*run.read_faults(), *added)))


@contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Context manager in which no other process adds faults to the run's plan."""
    with open(run.path / "control" / "faults.lock", "wb", opener=_private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
