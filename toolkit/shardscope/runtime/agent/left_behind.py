"""Detect ranks that have ended in mid-training, and the ranks that still wait for them.

Elastic notices a rank that ends with an error, and ends the other ranks with SIGTERM, which a stopped process does not
receive, and half a minute later with SIGKILL. If a rank ends without an error, for example because a library calls
`os._exit(0)`, elastic waits forever for its result.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import psutil

from shardscope.runlog.tail import of_last_attempt, read_events
from shardscope.runtime.record.rundir import RunDir

_PATIENCE_S = 3.0
"""Time that ranks may outlive a rank that ended in mid-training, in seconds, to write their own errors."""


class Left(Enum):
    """How many ranks ended in mid-training more than `_PATIENCE_S` seconds ago: none, some or all."""

    NONE = 0
    SOME = 1
    ALL = 2


@dataclass
class LeftBehind:
    """Watches the ranks of a run, which are passed to each call of `look`.

    Attributes:
        run: The run directory, whose events say whether a rank had finished training.
        earlier: Pids of ranks to ignore: those of earlier attempts, and those of this attempt that have finished
            training.
    """

    run: RunDir
    earlier: set[int]
    _ended: dict[int, float] = field(default_factory=dict)
    """When each rank was first seen to have ended."""
    _told: bool = False
    """Whether `SOME` has been returned. The caller then kills the remaining ranks, so nothing is left to report."""

    def look(self, ranks: Mapping[int, int | None]) -> Left:
        """Return how many ranks ended in mid-training more than `_PATIENCE_S` seconds ago; `SOME` is returned only
        once.

        If all ranks have ended, but some of them with an error, the result is `NONE`, as elastic is about to report the
        error.

        Args:
            ranks: Pids of all ranks that have been started, with their exit codes as far as elastic knows them.
        """
        if self._told:
            return Left.NONE
        pids, now = ranks.keys() - self.earlier, time.monotonic()
        for pid in filter(_has_ended, pids - self._ended.keys()):
            self._ended[pid] = now
        late = {pid for pid in pids & self._ended.keys() if now - self._ended[pid] > _PATIENCE_S}
        if late:  # only now, because this reads the events of the run
            self.earlier |= late - self.unfinished().keys()
        if late <= self.earlier:
            return Left.NONE
        left = pids - self.earlier
        if left <= self._ended.keys():
            return Left.ALL if all(ranks[pid] == 0 for pid in left) else Left.NONE
        self._told = True
        return Left.SOME

    def unfinished(self) -> dict[int, int]:
        """Return the ranks of this attempt that have not finished training, as a mapping from pid to rank."""
        of_rank: dict[int, int] = {}
        for event in of_last_attempt(read_events(self.run.path)):
            if event["event"] == "process":
                of_rank[event["rank"]] = event["pid"]
            elif event["event"] == "end":
                of_rank.pop(event["rank"], None)
        return {pid: rank for rank, pid in of_rank.items()}


def living(ranks: Iterable[int]) -> set[int]:
    """Return the pids of the ranks that have not ended."""
    return {pid for pid in ranks if not _has_ended(pid)}


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
