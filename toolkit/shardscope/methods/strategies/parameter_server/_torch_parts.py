"""The parts of a run's data that asynchronous workers share: each takes the next part that no worker has taken.

The gradients of a run are numbered from 0, in the order of steps and, within a step, of the parts of its global batch.
The number of the next one is a counter in the process group's store, which adds and returns in one operation. A worker
takes its next number when it has finished a gradient, and so knows when it has finished its gradients of a step. All
gradients before the lowest number that a worker has taken and not finished are finished, so ranks that meet after a
step have finished exactly the gradients up to it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardscope.training.context import RankContext


@dataclass
class SharedParts:
    """One worker's view of the parts that workers share.

    Attributes:
        counter: Counter of the parts that workers have taken besides their first ones.
        worker: Index of this worker; for a rank that is not a worker, it is not used.
        num_workers: Number of workers, and of parts of each step.
    """

    counter: dist.Store
    worker: int
    num_workers: int
    _first: int = 0
    _next: int = -1

    @classmethod
    def of(cls, context: RankContext, group: dist.ProcessGroup, workers: range) -> SharedParts:
        """Return the parts of a run that begins; called by all ranks together.

        A store may outlive the ranks, which a restart replaces, so each run counts under a name of its own.
        """
        name = torch.tensor([secrets.randbits(62)], device=context.device)
        dist.broadcast(name, src=0)
        store = dist.PrefixStore(f"shared-parts/{int(name)}", group.get_group_store())
        worker = workers.index(context.rank) if context.rank in workers else 0
        return cls(store, worker, len(workers))

    def of_step(self, step: int) -> Iterator[int]:
        """Yield the parts of `step` that this worker takes, one after another; none if others have taken all.

        The first call is for the first step of the run, whose parts each worker takes one of.
        """
        if self._next < 0:
            self._first = (step - 1) * self.num_workers
            self._next = self._first + self.worker
        while self._next < step * self.num_workers:
            yield self._next % self.num_workers
            taken: int = self.counter.add("taken", 1)
            self._next = self._first + self.num_workers + taken - 1
