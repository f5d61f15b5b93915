"""Decide whether and how the ranks of a run are restarted after a failure; see `shardscope.spec.recovery`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardscope.runlog import clock
from shardscope.runlog.tail import of_last_attempt, read_events, select
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.agent.failure import Ending
from shardscope.runtime.agent.replicas import ReplicaMemory
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.secondary_failure import is_secondary_failure
from shardscope.runtime.record.status import Cause
from shardscope.spec import Job
from shardscope.spec.elastic import next_smaller
from shardscope.spec.recovery import Recovery
from shardscope.training.checkpoint.folders import complete_checkpoints, step_of

_ONLY_ONCE = frozenset({Cause.NOT_STARTED, Cause.DIRECTORY_GONE, Cause.REQUESTED, Cause.DRIVER_ENDED})
"""Causes of failures after which ranks are not started again."""


class ResumePoint(NamedTuple):
    """State from which an attempt starts.

    Attributes:
        resume: Directory of the run whose newest checkpoint is loaded, or a checkpoint; None trains from step 1 on.
        step: Step of the checkpoint; 0 if training begins anew.
        kind: ``replica``, ``disk`` or ``start``.
    """

    resume: str | None
    step: int = 0
    kind: str = "start"


class _Error(NamedTuple):
    """Identity of an error of the ranks' own code, to detect that it recurs."""

    type: str
    step: int


def restart_under_torchrun(run: RunDir, resume: str | None, count: int, rank: int) -> ResumePoint:
    """Return the state from which the ranks start after a restart by torchrun; rank 0 writes the event.

    Args:
        run: The run directory.
        resume: Run or checkpoint to resume from, as given on the command line.
        count: Number of restarts so far.
        rank: This rank.
    """
    restarts = Restarts(run, None, resume, count)
    source = restarts.source()
    if rank == 0:
        events = of_last_attempt(read_events(run.path))
        errors = sorted(select(events, "error", None), key=is_secondary_failure)
        error = {"message": "torchrun started the ranks again"}
        if errors:
            told = f"rank {errors[0]['rank']} failed: {errors[0]['type']}: {errors[0]['message']}"
            error = {**errors[0], "message": told}
        restarts.note(Ending("failed", error=error), source, events[-1]["t"] if events else clock.now())
    return source


@dataclass
class Restarts:
    """Decides after each attempt of a run whether its ranks are started again, and from which state.

    Attributes:
        run: The run directory.
        recovery: The job's recovery settings; None never restarts the ranks.
        resume: Run or checkpoint to resume from, as given at the launch.
        count: Number of restarts so far.
        memory: Memory in which the ranks keep copies of their state; None if they keep none.
    """

    run: RunDir
    recovery: Recovery | None
    resume: str | None
    count: int = 0
    memory: ReplicaMemory | None = None
    _before: set[_Error] = field(default_factory=set)
    _losses: int = 0

    def after(self, ending: Ending) -> ResumePoint | None:
        """Return the state from which the next attempt starts, given how the last one ended; None if the run ends."""
        if self.recovery is None or ending.state != "failed" or ending.cause in _ONLY_ONCE:
            return None
        if self.count >= self.recovery.restarts or self.run.stop_request.exists():
            return None
        error = _own_error(ending)
        if error is not None and (error.step == 0 or error in self._before):
            return None
        if error is not None:
            self._before.add(error)
        self.count += 1
        return self.source()

    def source(self) -> ResumePoint:
        """Return the newest complete state of this run, or else the one from which the launch asked to resume.

        The ranks themselves prefer a copy in memory to a checkpoint of the same step.
        """
        saved = complete_checkpoints(self.run.path / "checkpoints")
        source = (
            ResumePoint(str(self.run.path), step_of(saved[-1]), "disk") if saved else ResumePoint(self.resume)
        )
        copied = None if self.memory is None else self.memory.newest_step()
        if copied is not None and copied >= source.step:
            return source._replace(step=copied, kind="replica")
        return source

    def size_after(self, job: Job, world_size: int, ending: Ending) -> int:
        """Return the number of ranks that continue after a failure: fewer if an elastic job has lost a rank.

        Args:
            job: The job as it was launched.
            world_size: Number of ranks of the attempt that failed.
            ending: How that attempt ended.
        """
        is_lost = (ending.error or {}).get("rank") is not None and _own_error(ending) is None
        if job.elastic is None or not is_lost:
            return world_size
        self._losses += 1
        return world_size if self._losses <= job.elastic.spares else next_smaller(job, world_size)

    def note(
        self, ending: Ending, source: ResumePoint, failed_t: float, world_size: int | None = None
    ) -> None:
        """Write the event of a restart into rank 0's log; no rank may be running."""
        error = ending.error or {}
        with suppress(OSError), EventWriter(self.run.rank_file(0), 0) as events:
            events.emit(
                "restart", attempt=self.count, cause=str(error.get("message", "")), failed_rank=error.get("rank"),
                failed_step=error.get("step"), step=source.step, source=source.kind, failed_t=failed_t,
                **({} if world_size is None else {"world_size": world_size}),
            )  # fmt: skip

    def ended(self, ending: Ending) -> Ending:
        """Return how the run ended, given how its last attempt ended."""
        if ending.state != "failed" or self.recovery is None or ending.error is None:
            return ending
        error = {**ending.error, "message": f"{ending.error['message']}{self._why_no_more(ending)}"}
        return replace(ending, error=error)

    def _why_no_more(self, ending: Ending) -> str:
        """Return why the ranks are not started again, to append to the error."""
        assert self.recovery is not None
        error = _own_error(ending)
        if error is not None and error in self._before:
            return "; it failed in the same way before, so another restart would not help"
        if error is not None and error.step == 0:
            return "; a restart would not help"
        if self.count and self.count >= self.recovery.restarts:
            return f"; recovery={self.count} allows no further restart"
        return ""


def _own_error(ending: Ending) -> _Error | None:
    """Return the error that code on a rank raised; None if a rank was killed, or only lost its peers."""
    error = ending.error or {}
    if "type" not in error or is_secondary_failure(error):
        return None
    return _Error(error["type"], error.get("step") or 0)
