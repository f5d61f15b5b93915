"""What ranks resume from, and how ranks of another number go on in the same run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from shardscope.runtime.record.rundir import RunDir, checkpoints_of
from shardscope.training.context import RankContext

if TYPE_CHECKING:
    from shardscope.spec import Job
    from shardscope.training.checkpoint import Loaded


class Resume(NamedTuple):
    """What to resume from: a run directory or a checkpoint in one."""

    source: Path

    @property
    def checkpoints(self) -> Path:
        """The checkpoint, or the folder of checkpoints whose newest one is loaded."""
        return checkpoints_of(self.source)


def newest_of(run: RunDir, context: RankContext, otherwise: Resume | None) -> Resume | None:
    """Return the run itself as what to resume from, if it has a checkpoint; the same on all ranks."""
    from shardscope.training.checkpoint import complete_checkpoints  # a slow import

    found = [bool(complete_checkpoints(run.path / "checkpoints"))] * context.world_size
    if context.group is not None:
        dist.all_gather_object(found, found[context.rank])
    return Resume(run.path) if any(found) else otherwise


def announce_resize(run: RunDir, job: Job, context: RankContext, saved: Loaded) -> None:
    """On rank 0, write an event if a checkpoint or a copy of this run was saved by another number of ranks."""
    from shardscope.training.checkpoint.memory import folder_here  # a slow import

    sources = {run.path / "checkpoints": "disk", folder_here(): "replica"}
    source = sources.get(saved.path.parent)
    if context.rank == 0 and source is not None and saved.world_size not in (None, context.world_size):
        context.events.emit(
            "resize", step=saved.step, before=saved.world_size, world_size=context.world_size, source=source,
            global_batch=job.batch.global_batch, lr=job.optimizer.lr,
        )  # fmt: skip
