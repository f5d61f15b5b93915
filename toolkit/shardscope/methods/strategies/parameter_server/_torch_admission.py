"""Admission control: when a server may apply the gradients it holds.

The staleness of a gradient is the number of updates that the server has applied between the pull that the gradient was
computed on and its own application. Held gradients may be applied if that makes no gradient still being computed staler
than the bound. Held gradients are applied together, so they do not become staler. A resting worker blocks no other.

With several servers, one may count a worker as computing that has its answer but is waiting for another server. This
cannot lead to a deadlock. Suppose server S holds gradient a of one worker back because of another worker, whose
gradient b it has applied. Then S answered the first worker's gradient before a not earlier than b, or a would be too
stale already. So b was pushed before a. In a cycle of waits, a gradient would have been pushed before itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AdmittedUpdate:
    """Workers whose gradients make up one update, and the staleness of each gradient, ordered by worker."""

    workers: list[int]
    staleness: list[int]


@dataclass
class Admission:
    """Gradients of one server, by the version of the parameters that they were computed on.

    Attributes:
        bound: Maximum staleness of a gradient, in updates; infinite for no bound.
        version: Updates applied so far.
        computing: Version pulled by each worker that is computing.
        held: Version pulled by each worker whose gradient is held.
    """

    bound: float
    version: int = 0
    computing: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

    def pull(self, workers: Iterable[int]) -> None:
        """Record that these workers have the newest parameters and are computing."""
        self.computing |= dict.fromkeys(workers, self.version)

    def push(self, worker: int) -> None:
        """Record that a worker's gradient has arrived."""
        self.held[worker] = self.computing.pop(worker)

    def rest(self, worker: int) -> None:
        """Record that a worker stops computing, temporarily or finally."""
        self.computing.pop(worker, None)

    @property
    def is_due(self) -> bool:
        """Whether the held gradients are to be applied now."""
        return bool(self.held) and all(
            self.version - pulled < self.bound for pulled in self.computing.values()
        )

    def take(self, *, applied: bool = True) -> AdmittedUpdate:
        """Return all held gradients as one update; `applied` is False if the update is skipped."""
        workers = sorted(self.held)
        update = AdmittedUpdate(workers, [self.version - self.held.pop(worker) for worker in workers])
        assert max(update.staleness) <= self.bound
        self.version += applied
        return update
