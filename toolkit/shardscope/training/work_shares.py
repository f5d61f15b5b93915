"""Division of the global batch among ranks of different speeds, fixed or by measured speed.

Each rank processes its own number of samples in a step, and its gradients are weighted by it, so that the mean over the
ranks is the mean over all samples of the batch. Shares by measured speed start equal. After a few steps, each rank
publishes its compute time per sample in the process group's store, and all ranks compute the same new division. The
rows of a batch do not depend on the division, so each sample is used once in an epoch as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from statistics import median
from typing import Any

import torch.distributed as dist

from shardscope.runlog.spans import phase_seconds
from shardscope.spec import Job
from shardscope.spec.shares import MEASURED, samples_by_speed
from shardscope.training.context import RankContext
from shardscope.training.data import Loader
from shardscope.training.strategies.base import RankStrategy

MEASURED_STEPS = 4
"""Number of steps whose compute times are measured for a division, after one step that is not measured. The first step
with a new size of micro-batches also allocates memory."""
WORTH = 0.02
"""Minimum reduction of the slowest rank's time, as a fraction, for which the batch is redivided; less is noise."""
_PASSES = ("forward", "backward")
_made = count()
"""Counter that numbers the divisions measured by this process, so that several trainings can share a store."""


class WorkShares:
    """The number of samples of each rank in a step, as known to one rank that reads data.

    Args:
        job: The job.
        context: This rank's context.
        strategy: This rank's strategy, whose `sample_weight` is kept up to date.
        loader: This rank's loader, whose division of the batch is kept up to date.
    """

    def __init__(self, job: Job, context: RankContext, strategy: RankStrategy, loader: Loader) -> None:
        self.job, self.context, self.strategy, self.loader = job, context, strategy, loader
        self.samples = job.batch.samples(job.num_data_ranks)
        self._is_measuring = job.batch.shares == MEASURED and len(self.samples) > 1
        self._seconds: list[float] = []
        self._skipping = 1
        self._waiting_for = 0
        group = context.group
        if self._is_measuring and group is not None:
            self._store = dist.PrefixStore(f"work-shares/{next(_made)}", group.get_group_store())
        if job.batch.shares is not None:
            self._apply()

    @property
    def own(self) -> int:
        """Number of samples of this rank in a step."""
        return self.samples[self.loader.rank]

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of this rank in a step."""
        return self.own // (self.job.batch.micro_batch or self.own)

    def _apply(self) -> None:
        self.loader.divide(self.samples)
        self.strategy.sample_weight = self.own * len(self.samples) / self.job.batch.global_batch

    def after_step(self, step: int, spans: Iterable[Sequence[Any]], waited: Mapping[str, float]) -> None:
        """Measure a step that this rank has taken, and redivide the batch when due; called on all ranks that read data.

        Args:
            step: Number of the step.
            spans: The rank's spans of the step, as rows of an event.
            waited: Time that the rank waited for other ranks within passes, in seconds, by name of the pass.
        """
        if not self._is_measuring:
            return
        if self._waiting_for > 0:
            self._waiting_for -= 1
        elif self._skipping > 0:
            self._skipping -= 1
        else:
            phases = phase_seconds(spans, waited)
            self._seconds.append(sum(phases.get(name, 0.0) for name in _PASSES))
        if len(self._seconds) == MEASURED_STEPS:
            self._divide(step)

    def _divide(self, step: int) -> None:
        seconds, self._seconds = median(self._seconds), []
        every, measured = self.job.batch.rebalance_every, MEASURED_STEPS + 1
        self._is_measuring = every is not None
        self._skipping, self._waiting_for = 1, max(0, (every or 0) - measured)
        per_sample = self._published(step, seconds / self.own)
        batch = self.job.batch
        found = samples_by_speed(
            batch.global_batch, [1 / each for each in per_sample], batch.micro_batch or 1
        )
        before, after = (_slowest_s(samples, per_sample) for samples in (self.samples, found))
        if after > (1 - WORTH) * before:
            return
        self.samples = found
        self._apply()
        pace = self.context.meter.pace
        if pace is not None and batch.micro_batch is None:
            pace.recount()
        if self.loader.rank == 0:
            self.context.events.emit(
                "shares",
                step=step + 1,
                samples=list(found),
                seconds_per_sample=[round(each, 9) for each in per_sample],
            )

    def _published(self, step: int, own: float) -> list[float]:
        """Publish this rank's seconds per sample, and return the values of all ranks that read data."""
        self._store.set(f"{step}/{self.loader.rank}", f"{max(own, 1e-12)!r}")
        return [float(self._store.get(f"{step}/{rank}")) for rank in range(len(self.samples))]


def _slowest_s(samples: Sequence[int], per_sample: Sequence[float]) -> float:
    return max(size * seconds for size, seconds in zip(samples, per_sample, strict=True))
