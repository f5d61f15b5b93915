"""A member's interval: an ordinary run in a folder of its own, where any later driver can find it.

    runs/interval-003/member-05/<time>-member-05/

A run that completed there counts, even if the driver was killed before it recorded the outcome. Any other run is
repeated.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardscope.runtime import Run, launch, runs
from shardscope.spec import Checkpoint, Job
from shardscope.tuning.measured import Objective, TrialReader, interval_values
from shardscope.tuning.population.record import MemberStart, Outcome, Plan

POLL_S = 0.02


class Stopped(Exception):
    """A stop of the population was requested."""


def home_of(folder: Path, interval: int, member: int) -> Path:
    """Return the folder for a member's interval; it contains several runs only if the earlier ones were killed."""
    return folder / "runs" / f"interval-{interval:03d}" / f"member-{member:02d}"


def job_of(job: Job, plan: Plan, interval: int, member: int) -> Job:
    """Return the job of one interval of a member, with the settings of `job`."""
    return job.replace(
        steps=plan.steps,
        until=interval * plan.interval_steps,
        checkpoint=Checkpoint(),
        name=f"member-{member:02d}",
    )


@dataclass
class Trainee:
    """One member in one interval, running or waiting to start."""

    folder: Path
    interval: int
    move: MemberStart
    job: Job
    parent: Run | None
    """Run from whose checkpoint to resume; None starts from scratch."""
    objectives: Sequence[str]
    timeout_s: float | None
    own: Mapping[str, Objective] = field(default_factory=dict)
    run: Run | None = None
    started: float = 0.0

    def start(self) -> None:
        """Launch the run, unless it completed in an earlier attempt."""
        home = home_of(self.folder, self.interval, self.move.member)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        for run in runs(home):
            if (run.path / "status.json").is_file():  # else it was never launched
                run.stop()  # the run of a killed driver; it would end soon anyway
                self.run = run if run.state == "completed" else self.run
        self.started = time.monotonic()
        if self.run is None:
            self.run = launch(self.job, root=home, resume=self.parent)

    def outcome(self) -> Outcome | None:
        """Return the outcome of the interval; None while the run is alive and within its time limit."""
        assert self.run is not None
        late = self.timeout_s is not None and time.monotonic() - self.started > self.timeout_s
        if late:
            self.run.stop()
        elif self.run.is_alive:
            return None
        return self._ended(self.run)

    def _ended(self, run: Run) -> Outcome:
        path = str(run.path.relative_to(self.folder))
        if run.state != "completed":
            return self._failed(path, self._reason(run))
        scores, problem = interval_values(
            self.objectives, run, TrialReader(run, is_piece=True).poll(), self.own
        )
        if problem is not None:
            return self._failed(path, problem)
        went_on = [event for event in run.events("resume") if event["rank"] == 0]
        notes = tuple(note for event in went_on for note in event["notes"])
        steps = self.job.last_step - (went_on[0]["step"] if went_on else 0)
        samples = (went_on[0]["samples"] if went_on else 0) + steps * self.job.batch.global_batch
        return Outcome(self.interval, self.move.member, path, scores, samples=samples, notes=notes)

    def _reason(self, run: Run) -> str:
        if run.error is not None:
            return run.error.args[0] if run.error.args else "it failed"
        return (
            f"it took longer than timeout_s={self.timeout_s:g}"
            if self.timeout_s is not None
            else "it was stopped"
        )

    def _failed(self, path: str, reason: str) -> Outcome:
        who = f"member {self.move.member} failed in interval {self.interval} and counts as the worst"
        return Outcome(self.interval, self.move.member, path, None, failure=f"{who}: {reason}")


def train_all(
    trainees: Sequence[Trainee],
    *,
    at_once: int,
    asked_to_stop: Callable[[], bool],
    on_outcome: Callable[[Outcome], None],
) -> None:
    """Train all members, `at_once` at a time, and pass each outcome to `on_outcome` as soon as it is known.

    Args:
        trainees: Members to train.
        at_once: Maximum number of members that train at the same time.
        asked_to_stop: Returns whether a stop has been requested.
        on_outcome: Called with each outcome.

    Raises:
        Stopped: A stop was requested; running members have been stopped and have no outcome.
    """
    waiting, under_way = list(trainees), list[Trainee]()
    try:
        while waiting or under_way:
            _raise_if_stopped(asked_to_stop)
            while waiting and len(under_way) < at_once:
                under_way.append(waiting.pop(0))
                under_way[-1].start()
            for trainee in list(under_way):
                outcome = trainee.outcome()
                if outcome is not None:
                    under_way.remove(trainee)
                    on_outcome(outcome)
            time.sleep(POLL_S if under_way else 0)
    except BaseException:  # including an interrupt: no run continues without a watcher
        for trainee in under_way:
            if trainee.run is not None:
                trainee.run.stop()
        raise


def _raise_if_stopped(asked_to_stop: Callable[[], bool]) -> None:
    if asked_to_stop():
        raise Stopped


def drop_checkpoints(folder: Path, interval: int, *, but_of: Collection[str] = ()) -> None:
    """Delete an interval's checkpoints, except those of the runs in `but_of` (paths relative to `folder`)."""
    for path in (folder / "runs" / f"interval-{interval:03d}").glob("*/*/checkpoints"):
        if str(path.parent.relative_to(folder)) not in but_of:
            shutil.rmtree(path, ignore_errors=True)
