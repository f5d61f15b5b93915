"""Copies of a run's state in memory: when they are made, and when ranks resume from them after a failure or resize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.errors import CheckpointError, LaunchError
from shardscope.spec import Job
from shardscope.training.data import GlobalSampler
from shardscope.training.strategies.base import RankStrategy

if TYPE_CHECKING:
    import torch

    from shardscope.training.checkpoint import Loaded
    from shardscope.training.checkpoint.replicas import ReplicaSaver
    from shardscope.training.trainer import Trainer


class RunReplicas:
    """The copies of one run's state in host memory, on one rank.

    Args:
        job: The job.
        strategy: The strategy that holds the model.
        optimizer: The strategy's optimizer.
        sampler: The sampler, which has the position in the data.

    Raises:
        LaunchError: The job asks for copies, but no agent, which would outlive the ranks, provides memory for them.
    """

    def __init__(
        self, job: Job, *, strategy: RankStrategy, optimizer: torch.optim.Optimizer, sampler: GlobalSampler
    ) -> None:
        self._every = None if job.recovery is None else job.recovery.replica_every
        self._is_elastic = job.elastic is not None
        self._strategy, self._optimizer, self._sampler = strategy, optimizer, sampler
        self._saver: ReplicaSaver | None = None
        self._folder: Path | None = None
        if self._every is not None:
            self._folder = _required_folder(self._every)

    def is_due(self, step: int) -> bool:
        """Return whether the state after `step` is copied."""
        return self._every is not None and step % self._every == 0

    def save(self, step: int) -> None:
        """Copy the state after `step`; all ranks call this together. The copy is complete when this returns.

        Raises:
            CheckpointError: The memory is too small.
        """
        from shardscope.training.checkpoint.replicas import ReplicaSaver  # a slow import

        assert self._folder is not None
        if self._saver is None:
            self._saver = ReplicaSaver(self._folder, strategy=self._strategy, optimizer=self._optimizer)
        with self._strategy.all_ranks.paced(False):
            self._saver.save(step, self._sampler.state_dict())

    def hand_over(self, step: int, *, is_resizing: Callable[[], bool]) -> bool:
        """Keep the state after `step` in memory if a different number of ranks will continue; called by all ranks.

        Args:
            step: The last step taken.
            is_resizing: Returns whether a different number of ranks will continue; rank 0's answer applies to all
                ranks.

        Returns:
            Whether the next ranks will find the state in memory, so that the current ranks need not write it to the
            disk. False also if the memory is too small; an event then gives the reason.
        """
        if self._every is None or not self._is_elastic:
            return False
        from shardscope.training.checkpoint.agreement import gather_items

        context = self._strategy.all_ranks
        if not gather_items(context, context.rank == 0 and is_resizing())[0]:
            return False
        newest = None if self._saver is None else self._saver.newest
        if newest is not None and newest.name == f"step-{step}":
            return True
        try:
            self.save(step)
        except CheckpointError as error:  # raised on all ranks together
            if context.rank == 0:
                context.events.emit("not_handed_over", step=step, reason=str(error))
            return False
        return True

    def newer_than(self, disk: Path | None) -> Path | None:
        """Return the newest copy on this node, if it is not older than the checkpoints on disk; all ranks call this.

        Args:
            disk: A checkpoint, or a folder of checkpoints; None if there is none.
        """
        if self._folder is None:
            return None
        from shardscope.training.checkpoint.agreement import gather_items
        from shardscope.training.checkpoint.folders import step_of
        from shardscope.training.checkpoint.replicas import complete_everywhere

        context = self._strategy.all_ranks
        on_disk = gather_items(context, 0 if disk is None else _newest_step(disk))[0]
        copy = complete_everywhere(self._folder, context)
        return copy if copy is not None and step_of(copy) >= on_disk else None


def resume_newest(trainer: Trainer, disk: Path | None) -> Loaded | None:
    """Resume from the newest copy in memory or, if that is older or cannot be loaded, from the disk.

    Args:
        trainer: The trainer, before its first step.
        disk: A checkpoint, or a folder of checkpoints; None if there is none.

    Returns:
        What was loaded; None if there is neither a copy nor a checkpoint.

    Raises:
        CheckpointError: There are copies or checkpoints, but none can be loaded. Training then does not start from
            scratch, because a part of the state may have been loaded.
    """
    copy, notes = trainer.replicas.newer_than(disk), list[str]()
    if copy is not None:
        try:
            return trainer.resume(copy, kind="replica")
        except CheckpointError as error:
            if disk is None:
                raise
            notes.append(f"the newest copy in memory was not used: {error}")
    return None if disk is None else trainer.resume(disk, notes=notes)


def _newest_step(disk: Path) -> int:
    from shardscope.training.checkpoint.folders import complete_checkpoints, is_checkpoint, step_of

    if is_checkpoint(disk):
        return step_of(disk)
    return max(map(step_of, complete_checkpoints(disk)), default=0)


def _required_folder(every: int) -> Path:
    from shardscope.training.checkpoint.memory import folder_here

    folder = folder_here()
    if folder is None:
        raise LaunchError(
            f"recovery.replica_every={every} needs an agent that holds memory for the copies: start the run with "
            "ss.launch on Linux, or set replica_every=None to recover from the disk"
        )
    return folder
