"""Admission control: decide when a server may apply the gradients that have arrived.

The staleness of a gradient is the number of updates that the server applies after the worker pulled the parameters for
this gradient, and before the gradient is applied. Gradients that have arrived may be applied if this does not make any
gradient that is still being computed staler than the bound. They are applied in one update, so they do not make each
other staler. A worker that pauses or ends does not block others.

With several servers, a server may count a worker as computing although the worker is waiting for another server. This
cannot lead to a deadlock. Suppose that server S holds back a gradient a of worker A because of worker B, which counts
as computing, and whose last gradient applied by S is b. Then S answered A's push before a no earlier than it answered
b; otherwise a would already be too stale. So b was pushed before a. In a cycle of waiting servers, a gradient would
have been pushed before itself, which is impossible.

With backup workers, an update uses the first gradients of a step, and drops gradients of the same step that arrive
later. The worker of a dropped gradient pulls the newest parameters, so it never computes a gradient for a step whose
update it knows to be over. Eventually, all workers compute gradients for the same step, so enough of them arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AdmittedUpdate:
    """Workers whose gradients are applied in one update, in ascending order, and the staleness of each gradient."""

    workers: list[int]
    staleness: list[int]


@dataclass
class Admission:
    """State of one server: for each worker, the version of the parameters that its gradient is computed on.

    Attributes:
        bound: Maximum staleness of a gradient, in updates; infinite for no bound.
        version: Number of updates applied so far.
        computing: For each worker that is computing, the version that it pulled.
        held: For each worker whose gradient has arrived but has not been applied, the version that it pulled.
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

    def stop_computing(self, worker: int) -> None:
        """Record that a worker has stopped computing, because it pauses or ends."""
        self.computing.pop(worker, None)

    def is_late(self, step: int) -> bool:
        """Return whether a gradient for `step` must be dropped; always False without backup workers."""
        return False

    @property
    def is_due(self) -> bool:
        """Whether the waiting gradients can be applied now."""
        return bool(self.held) and all(
            self.version - pulled < self.bound for pulled in self.computing.values()
        )

    def take(self, *, applied: bool = True, step: int = 0) -> AdmittedUpdate:
        """Remove all waiting gradients, and return them as one update.

        Args:
            applied: Whether parameters change; False if the update is skipped.
            step: The step of the gradients; has no effect without backup workers.
        """
        workers = sorted(self.held)
        update = AdmittedUpdate(workers, [self.version - self.held.pop(worker) for worker in workers])
        assert max(update.staleness) <= self.bound
        self.version += applied
        return update


@dataclass
class BackupAdmission(Admission):
    """State of a server with backup workers.

    Attributes:
        needed: Number of gradients that an update waits for; it waits for fewer once fewer workers are running.
        step: The last step whose update has been decided.
    """

    needed: int = 1
    step: int = 0

    def is_late(self, step: int) -> bool:
        return step <= self.step

    @property
    def is_due(self) -> bool:
        at_work = len(self.held) + len(self.computing)
        return bool(self.held) and len(self.held) >= min(self.needed, at_work)

    def take(self, *, applied: bool = True, step: int = 0) -> AdmittedUpdate:
        self.step = step
        return super().take(applied=applied)


def admission_of(bound: float, needed: int | None) -> Admission:
    """Return the initial state of a server.

    Args:
        bound: Maximum staleness of a gradient.
        needed: Number of gradients that an update waits for if there are backup workers; None without them.
    """
    return Admission(bound) if needed is None else BackupAdmission(bound, needed=needed)
