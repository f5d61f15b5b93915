"""When a server may apply the gradients it holds.

The staleness of a gradient is the number of updates that the server has applied between the pull that the gradient was
computed on and its own application. What is held may be applied as long as that makes no gradient that is still being
computed staler than the bound. What is held is applied together, so a held gradient does not age; whoever rests
holds nobody up.

With several servers, one may take a worker for computing that has its answer from it but waits for another server, so
servers could seem to wait for each other. They cannot: if server S holds gradient a of one worker back for the sake of
another whose gradient b it has applied, then it answered the first worker's gradient before a not earlier than b, or a
would be too stale already. So b was pushed before a, and likewise around any circle of waits: before itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Update:
    """The gradients of one update: whose they are, and how many updates old, in the order of the workers."""

    workers: list[int]
    staleness: list[int]


@dataclass
class Admission:
    """The gradients of one server, by the version of the parameters that they were computed on.

    Attributes:
        bound: The most updates that a gradient may be behind; infinite for any number.
        version: Updates applied so far.
        computing: Version pulled by each worker that computes.
        held: Version pulled by each worker whose gradient waits.
    """

    bound: float
    version: int = 0
    computing: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

    def pull(self, workers: Iterable[int]) -> None:
        """These workers have the newest parameters, and compute."""
        self.computing |= dict.fromkeys(workers, self.version)

    def push(self, worker: int) -> None:
        """A worker's gradient is here."""
        self.held[worker] = self.computing.pop(worker)

    def rest(self, worker: int) -> None:
        """A worker stops computing for a while, or for good."""
        self.computing.pop(worker, None)

    @property
    def is_due(self) -> bool:
        """Whether what is held is to be applied now."""
        return bool(self.held) and all(
            self.version - pulled < self.bound for pulled in self.computing.values()
        )

    def take(self, *, applied: bool = True) -> Update:
        """All that is held, which makes up one update; `applied` is False where it is thrown away."""
        workers = sorted(self.held)
        update = Update(workers, [self.version - self.held.pop(worker) for worker in workers])
        assert max(update.staleness) <= self.bound
        self.version += applied
        return update
