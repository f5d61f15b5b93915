"""Schedule of a run's checkpoints: at a fixed interval, or at the one that minimises the time lost to failures."""

from __future__ import annotations

import contextlib
import os
import statistics
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.spec import Checkpoint, Job
from shardscope.spec.checkpoint import AUTO, daly_interval
from shardscope.training.data import GlobalSampler
from shardscope.training.strategies.base import RankStrategy

if TYPE_CHECKING:
    import torch

    from shardscope.training.checkpoint import Saver

_FIRST = 5
"""Number of steps before the first checkpoint, if the interval is chosen from measured times; first steps are slow."""
_WINDOW = 20
"""Number of the newest steps and saves whose median times determine the interval."""


class CheckpointInterval:
    """Decides, the same on all ranks, after which steps a checkpoint is saved."""

    def __init__(self, spec: Checkpoint) -> None:
        self._every = spec.every
        self._mtbf_s = spec.mtbf_s
        self._next = 0
        self._steps_s: deque[float] = deque(maxlen=_WINDOW)
        self._saves_s: deque[float] = deque(maxlen=_WINDOW)

    @property
    def is_chosen(self) -> bool:
        """Whether the interval is chosen from measured times."""
        return self._every == AUTO

    def is_due(self, step: int, took_s: float) -> bool:
        """Return whether to save after `step`, which took `took_s` seconds; called after every step."""
        if not isinstance(self._every, int):
            if self._every is None:
                return False
            self._steps_s.append(took_s)
            self._next = self._next or step + _FIRST - 1
            return step >= self._next
        return step % self._every == 0

    def measured(self, save_s: float) -> tuple[float, float]:
        """Record how long a save has delayed training; return the median times of saves and of steps, in seconds."""
        self._saves_s.append(save_s)
        return statistics.median(self._saves_s), statistics.median(self._steps_s)

    def choose(self, step: int, *, save_s: float, step_s: float) -> int:
        """Choose the next step after which to save, and return the interval in steps.

        Args:
            step: The step after which a checkpoint has just been saved.
            save_s: Time for which a save delays the slowest rank, in seconds.
            step_s: Time of a step on the slowest rank, in seconds.
        """
        assert self._mtbf_s is not None
        every: int = max(1, round(daly_interval(max(save_s, 1e-6), self._mtbf_s) / max(step_s, 1e-6)))
        self._next = step + every
        return every


class RunCheckpoints:
    """The checkpoints of one run on one rank.

    Args:
        job: The job.
        folder: The run directory; checkpoints are written to its subfolder ``checkpoints/``.
        strategy: The strategy that holds the model.
        optimizer: The strategy's optimizer.
        sampler: The sampler, which has the position in the data.
    """

    def __init__(
        self, job: Job, folder: Path, *, strategy: RankStrategy, optimizer: torch.optim.Optimizer,
        sampler: GlobalSampler,
    ) -> None:  # fmt: skip
        self.job, self.folder = job, folder
        self.strategy, self.optimizer, self.sampler = strategy, optimizer, sampler
        self.interval = CheckpointInterval(job.checkpoint)
        self._saver: Saver | None = None
        self._descriptor: int | None = None  # of the run directory, if there is one
        with contextlib.suppress(FileNotFoundError):
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)

    @property
    def newest(self) -> Path | None:
        """Path of the newest complete checkpoint that this run has saved; None if there is none."""
        return None if self._saver is None else self._saver.newest

    def holds(self, step: int) -> bool:
        """Return whether the checkpoint after `step` is complete or being written."""
        known = [] if self._saver is None else [self._saver.newest, self._saver.in_flight]
        return any(path is not None and path.name == f"step-{step}" for path in known)

    def save(self, step: int) -> None:
        """Save a checkpoint after `step`; all ranks call this together.

        Raises:
            CheckpointError: This or the previous checkpoint could not be written; earlier ones are kept.
        """
        from shardscope.training.checkpoint import Saver  # a slow import, needed only to save or resume

        context, spec = self.strategy.all_ranks, self.job.checkpoint
        if context.rank == 0 and self._descriptor is not None:
            self._keep_folder(self._descriptor)
        if self._saver is None:
            self._saver = Saver(
                self.folder / "checkpoints", strategy=self.strategy, optimizer=self.optimizer, keep=spec.keep,
                asynchronous=spec.asynchronous, incremental=spec.incremental,
            )  # fmt: skip
        self._saver.save(step, self.sampler.state_dict())
        if self.interval.is_chosen:
            self._choose_interval(step, self._saver.blocked_s)

    def check(self) -> None:
        """Raise the error of a failed checkpoint in the background, if there is one; called every step.

        Raises:
            CheckpointError: The checkpoint could not be written; earlier ones are kept.
        """
        if self._saver is not None:
            self._saver.check()

    def wait(self) -> None:
        """Wait until no checkpoint is being written in the background.

        Raises:
            CheckpointError: The checkpoint could not be written; earlier ones are kept.
        """
        if self._saver is not None:
            self._saver.wait()

    def _choose_interval(self, step: int, save_s: float) -> None:
        from shardscope.training.checkpoint.agreement import gather_items

        context = self.strategy.all_ranks
        saves_s, steps_s = zip(*gather_items(context, self.interval.measured(save_s)), strict=True)
        slowest = {"save_s": max(saves_s), "step_s": max(steps_s)}
        every = self.interval.choose(step, **slowest)
        if context.rank == 0:
            context.events.emit("checkpoint_interval", step=step, every=every, **slowest)

    def _keep_folder(self, descriptor: int) -> None:
        """Create ``checkpoints/`` in the open run directory, which may have been moved and its old path reused."""
        with contextlib.suppress(OSError):  # if this fails, saving will fail on all ranks with an error
            os.mkdir("checkpoints", 0o700, dir_fd=descriptor)
