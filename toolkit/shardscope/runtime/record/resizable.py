"""The part of a `Run` that changes its number of ranks while it trains."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Protocol, Self

from shardscope.errors import RunUnreadable, SpecError
from shardscope.methods.strategies.pipeline import Pipeline
from shardscope.runtime.record.run_part import RunPart

if TYPE_CHECKING:
    from shardscope.spec import Job


class _Sized(Protocol):
    @property
    def job(self) -> Job: ...
    @property
    def world_size(self) -> int: ...


def job_now(run: _Sized) -> Job:
    """Return the job of a run on its current number of ranks; the job itself, unless the run was resized."""
    return run.job if run.job.elastic is None else run.job.at_size(run.world_size)


class Resizable(RunPart):
    """The part of a `Run` that changes its number of ranks while it trains."""

    @property
    def world_size(self) -> int:
        """Number of ranks that train now, or that took the last step of a run that has ended."""
        return self.reduced().world_size

    @property
    def resized_job(self) -> Job:
        """The job on the current number of ranks (`Job.at_size`); the job itself, unless the run was resized."""
        return job_now(self)

    def resize(self, world_size: int) -> Self:
        """Go on with another number of ranks after the step in progress, and return at once.

        The ranks save a checkpoint (with `Recovery.replica_every`, a copy in memory) and end; `world_size` new ranks
        load it, with model, optimizer and data divided anew, and take the next step, so no step is lost. Only if the
        copy turns out to be damaged, the steps since the newest checkpoint are repeated, and the event `resume` says
        why. If the new ranks cannot start, the former number goes on, and the event `restart` says why. A later call
        replaces an earlier one that no rank has seen. A run that reaches its last step first ends as
        it would without this call.

        Raises:
            SpecError: The job is not elastic or cannot train on this number of ranks, the run has ended, or its ranks
                were started by torchrun, where nodes join and leave instead.
            RunUnreadable: The run directory cannot be written.

        Example:
            >>> run = ss.launch(ss.Job(model="mlp", data="digits", world_size=2, elastic="2:4"))  # doctest: +SKIP
            >>> run.resize(4).wait().summary().world_sizes  # doctest: +SKIP
            '2 → 4'
        """
        job = self.job.at_size(
            index(world_size)
        )  # raises SpecError if the job does not suit the number of ranks
        if isinstance(job.strategy, Pipeline):
            for event in self.events("pipeline_layers")[-1:]:  # which only ranks know of a user's model
                job.strategy.check_depth(event["count"], job.world_size, of="the model")
        if not self.is_alive:
            raise SpecError(
                f"run {self.id} has ended; resume it with another number of ranks: "
                f"ss.launch(run.job.at_size({world_size}), resume=run)"
            )
        if self._dir.by_torchrun.exists():
            raise SpecError(
                f"the ranks of run {self.id} were started by torchrun; start it on more nodes, or end it on some, "
                "instead of calling resize"
            )
        try:
            self._dir.request_resize(world_size)
        except OSError as error:
            raise RunUnreadable(f"run {self.id} cannot be resized: {error.strerror}") from None
        return self
