"""Admission control: decide when a server may apply the gradients that it holds.

The staleness of a gradient is the number of updates that the server applies between the pull of the parameters on which
the gradient was computed and its own application. Held gradients may be applied if no gradient that is still being
computed becomes staler than the bound. They are applied together, so they do not make each other staler. A resting
worker does not block others.

With several servers, a server may count a worker as computing although the worker is waiting for another server. This
cannot lead to a deadlock. Suppose that server S holds back a gradient a because of another worker, whose gradient b it
has applied. Then S answered the push before a, by the same worker, no earlier than it answered b; otherwise a would
already be too stale. So b was pushed before a. In a cycle of waits, a gradient would have been pushed before itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AdmittedUpdate:
    """Workers whose gradients form one update, in ascending order, and the staleness of each gradient."""

    workers: list[int]
    staleness: list[int]


@dataclass
class Admission:
    """State of one server: for each worker, the version of the parameters on which its gradient is computed.

    Attributes:
        bound: Maximum staleness of a gradient, in updates; infinite for no bound.
        version: Number of updates applied so far.
        computing: Version pulled by each worker that is computing.
        held: Version pulled by each worker whose gradient has arrived but has not been applied.
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
        """Record that a worker stops computing, for a pause or for good."""
        self.computing.pop(worker, None)

    @property
    def is_due(self) -> bool:
        """Whether the held gradients can be applied now."""
        return bool(self.held) and all(
            self.version - pulled < self.bound for pulled in self.computing.values()
        )

    def take(self, *, applied: bool = True) -> AdmittedUpdate:
        """Release all held gradients as one update, and return it; `applied` is False if the update is skipped."""
        workers = sorted(self.held)
        update = AdmittedUpdate(workers, [self.version - self.held.pop(worker) for worker in workers])
        assert max(update.staleness) <= self.bound
        self.version += applied
        return update
