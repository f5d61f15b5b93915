"""The driver of a population: in each interval it trains all members, scores them and decides on the next interval.

The driver keeps no state outside the journal, and every random decision depends only on the seed, the interval and the
member. So training the same population again in the same folder resumes it, regardless of how it ended.

An interval of a member is an ordinary run in a folder of its own, where any later driver can find it:

    runs/interval-003/member-05/<time>-member-05/

A run that completed in this folder is used, even if the driver was killed before it recorded the outcome. A run that
did not complete is repeated.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from shardscope._experimental import experimental
from shardscope.errors import SpecError
from shardscope.runtime import Run, launch, runs
from shardscope.runtime.record.rundir import runs_root
from shardscope.spec import Checkpoint, Job
from shardscope.spec import space as spec
from shardscope.spec._base import Spec
from shardscope.tuning.definition import check_objectives, named_objectives
from shardscope.tuning.measured import Objective, TrialReader, values_of
from shardscope.tuning.population.exploit import choose_parents
from shardscope.tuning.population.explore import MAY_CHANGE, Conditional, Explorable, Ranges
from shardscope.tuning.population.journal import (
    NAME,
    Course,
    Journal,
    MemberStart,
    Outcome,
    Plan,
    PopulationError,
    moves_line,
    outcome_line,
    plan_line,
    read_lines,
)
from shardscope.tuning.population.view import Population
from shardscope.tuning.runs import RunDriver, Watched

Space = Explorable | spec.Space | Mapping[str, Any]


@experimental
def train_population(
    job: Job,
    space: Space,
    *,
    members: int = 8,
    intervals: int = 5,
    interval_steps: int | None = None,
    objectives: str | Sequence[str] | Mapping[str, Objective | None] = "loss",
    quantile: float = 0.25,
    resample: float = 0.25,
    seed: int = 0,
    at_once: int = 1,
    timeout_s: float | None = None,
    folder: str | Path | None = None,
) -> Population:
    """Train a population to the end, or until it is stopped. The same call with the same `folder` resumes it.

    Args:
        job: What every member trains; it supplies all settings that are not in the space.
        space: Search space as for `tune`, without settings that cannot change during training (precision, world size,
            seed). To choose among whole parts of a job, or to search its other fields, use dotted paths as in `Ranges`.
            Any other `Explorable` also works.
        members: Number of members, at least 2.
        intervals: Number of intervals, at least 1. Each ends with an evaluation and, except the last, with exploit and
            explore.
        interval_steps: Steps per interval; None divides the job's steps among the intervals. The LR schedule spans all
            intervals.
        objectives: Objectives as for `tune`: ``loss`` and ``error`` at the end of an interval; ``seconds``, ``bytes``
            and ``memory`` per step of the interval; or your own functions of the interval's run.
        quantile: Fraction of the members that copy other members after an interval, 0 < value <= 0.5.
        resample: Probability that a clone's setting is resampled instead of perturbed.
        seed: Seed of the population's random decisions. Weights and data order use the job's own seed.
        at_once: Number of members that train at the same time.
        timeout_s: Time limit of a member's interval, in seconds; a member that exceeds it has failed. None sets no
            limit.
        folder: Folder of the journal and the runs; None creates one in the runs' root.

    Raises:
        SpecError: An argument or the space is invalid.
        PopulationError: The folder holds a different population, another process trains it, or all members have failed.

    Example:
        >>> import shardscope as ss
        >>> job = ss.Job(model="mlp", data="digits", steps=100)
        >>> space = {"optimizer.lr": (1e-4, 1e-1, "log"), "batch": (16, 128, "log2")}
        >>> ss.train_population(job, space, members=4, intervals=5).schedule()  # doctest: +SKIP
    """
    names, own = named_objectives(objectives)
    if not names:
        raise SpecError("objectives=() is empty; use for example ('loss', 'bytes')")
    check_objectives(names, own)
    _check(members=members, intervals=intervals, quantile=quantile, resample=resample, at_once=at_once)
    each = _interval_steps(job, intervals, interval_steps)
    asked, job = job, job.replace(steps=intervals * each, until=None)
    known = _explorable(space, job)
    plan = Plan(
        json.loads(asked.model_dump_json()), json.loads(json.dumps(known.describe())), members, intervals, each, names,
        quantile, resample, seed, tuple(own),
    )  # fmt: skip
    known.apply(
        job, known.draw(job, Random(seed))
    )  # a space without a valid job is rejected before a folder is created
    path = _folder(asked, folder)
    with Journal(path / NAME) as journal:
        PopulationDriver(job, known, plan, journal, at_once, timeout_s, own).train()
    return Population(path)


class Stopped(Exception):
    """A stop of the population was requested."""


@dataclass
class Trainee(Watched):
    """A member that is training an interval."""

    move: MemberStart
    job: Job
    began: float = field(default_factory=time.monotonic)


@dataclass
class PopulationDriver(RunDriver[Trainee]):
    """Driver that continues one population from the end of its journal."""

    job: Job
    space: Explorable
    plan: Plan
    journal: Journal
    parallel: int
    timeout_s: float | None
    own: Mapping[str, Objective]
    live: dict[int, Trainee] = field(default_factory=dict)
    interval: int = 0
    waiting: list[MemberStart] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = self.journal.path.parent
        self.course = Course.of(read_lines(self.journal.path))
        self.stop_request = Population(self.folder).stop_request

    def train(self) -> None:
        """Train all intervals that are left."""
        if self.course.plan is None:
            self._write(plan_line(self.plan))
        elif self.course.plan != self.plan:
            raise PopulationError(_difference(self.folder, self.course.plan, self.plan))
        if self.course.state == "completed":
            return
        self.stop_request.unlink(missing_ok=True)
        self._write({"event": "state", "state": "running"})
        try:
            for interval in range(1, self.plan.intervals + 1):
                self._train(interval)
                self._conclude(interval)
        except (Stopped, KeyboardInterrupt) as stop:
            self._write({"event": "state", "state": "stopped"})
            if isinstance(stop, KeyboardInterrupt):
                raise
        except PopulationError:
            self._write({"event": "state", "state": "failed"})
            raise
        else:
            self._write({"event": "state", "state": "completed"})

    def _write(self, line: Mapping[str, Any]) -> None:
        """Write a line to disk, then update the progress with it."""
        self.journal.append(line)
        self.course.take(json.loads(json.dumps(line)))

    def _train(self, interval: int) -> None:
        """Train all members that have not completed this interval."""
        if self.course.is_over(interval):
            return
        if interval not in self.course.moves:
            self._write(moves_line(interval, self._moves(interval)))
        parents = {move.parent for move in self.course.moves[interval] if move.parent is not None}
        self._drop_checkpoints(interval - 1, but_of=[self._run_of(interval - 1, p) for p in parents])
        is_done = self.course.outcomes
        self.interval = interval
        self.waiting = [m for m in self.course.moves[interval] if (interval, m.member) not in is_done]
        self.run()

    def _run_of(self, interval: int, member: int) -> str:
        return self.course.outcomes[interval, member].run

    # The runs of an interval.

    def tick(self) -> bool:
        if self.stop_request.exists():
            raise Stopped
        return super().tick()

    def _start(self) -> bool:
        """Launch the run of the next member, unless it completed in an earlier attempt."""
        if not self.waiting:
            return False
        move, completed = self.waiting.pop(0), None
        home = self.folder / "runs" / f"interval-{self.interval:03d}" / f"member-{move.member:02d}"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        for run in runs(home):
            if (run.path / "status.json").is_file():  # else it was never launched
                run.stop()  # the run of a killed driver; it would end soon anyway
                completed = run if run.state == "completed" else completed
        job = self.space.apply(self.job, move.settings).replace(
            steps=self.plan.steps, until=self.interval * self.plan.interval_steps, checkpoint=Checkpoint(),
            name=f"member-{move.member:02d}",
        )  # fmt: skip
        run = completed or launch(job, root=home, resume=self._parent_of(move))
        self.live[move.member] = Trainee(run, TrialReader(run, is_piece=True), move, job)
        return True

    def _parent_of(self, move: MemberStart) -> Run | None:
        """Return the run from whose checkpoint a member resumes; None if it starts from scratch."""
        if move.parent is None:
            return None
        return Run.attach(self.folder / self._run_of(self.interval - 1, move.parent))

    def _watch(self, live: Trainee) -> None:
        if self.timeout_s is not None and time.monotonic() - live.began > self.timeout_s:
            live.run.stop()
            self._finish(live)

    def _finish(self, live: Trainee) -> None:
        del self.live[live.move.member]
        self._write(outcome_line(self._outcome(live)))

    def _outcome(self, live: Trainee) -> Outcome:
        run, member, path = live.run, live.move.member, str(live.run.path.relative_to(self.folder))
        is_complete = run.state == "completed"
        scores, problem = (
            values_of(self.plan.objectives, run, live.meter.poll(), self.own, is_piece=True)
            if is_complete
            else ({}, self._problem(run))
        )
        if problem is not None:
            who = f"member {member} failed in interval {self.interval} and counts as the worst"
            return Outcome(self.interval, member, path, None, failure=f"{who}: {problem}")
        went_on = [event for event in run.events("resume") if event["rank"] == 0]
        notes = tuple(note for event in went_on for note in event["notes"])
        step, samples = (went_on[0]["step"], went_on[0]["samples"]) if went_on else (0, 0)
        samples += (live.job.last_step - step) * live.job.batch.global_batch
        return Outcome(self.interval, member, path, scores, samples=samples, notes=notes)

    def _problem(self, run: Run) -> str:
        """Return why the run did not complete."""
        if run.error is not None:
            return run.error.args[0] if run.error.args else "it failed"
        is_limited = self.timeout_s is not None
        return f"it took longer than timeout_s={self.timeout_s:g}" if is_limited else "it was stopped"

    def _drop_checkpoints(self, interval: int, *, but_of: Collection[str] = ()) -> None:
        """Delete an interval's checkpoints, except those of the runs in `but_of`."""
        for path in (self.folder / "runs" / f"interval-{interval:03d}").glob("*/*/checkpoints"):
            if str(path.parent.relative_to(self.folder)) not in but_of:
                shutil.rmtree(path, ignore_errors=True)

    def _conclude(self, interval: int) -> None:
        self._drop_checkpoints(interval - 1)
        outcomes = self._outcomes(interval)
        if all(outcome.scores is None for outcome in outcomes):
            raise PopulationError(
                f"all {len(outcomes)} members failed in interval {interval}; the first: {outcomes[0].failure}"
            )
        if interval == self.plan.intervals:
            front = Population(self.folder).front
            self._drop_checkpoints(interval, but_of=[self._run_of(interval, e.member) for e in front])

    def _outcomes(self, interval: int) -> list[Outcome]:
        return [self.course.outcomes[interval, move.member] for move in self.course.moves[interval]]

    # Settings and parents for an interval.

    def _moves(self, interval: int) -> list[MemberStart]:
        if interval == 1:
            return [
                MemberStart(
                    member, None, None, self.space.draw(self.job, self._random(interval, member)), "drawn"
                )
                for member in range(self.plan.members)
            ]
        costs = {
            outcome.member: None if outcome.scores is None else outcome.costs(self.plan.objectives)
            for outcome in self._outcomes(interval - 1)
        }
        parents = choose_parents(costs, quantile=self.plan.quantile, random=self._random(interval, "parents"))
        settings = {move.member: move.settings for move in self.course.moves[interval - 1]}
        return [self._move(interval, member, parent, settings) for member, parent in parents.items()]

    def _move(self, interval: int, member: int, parent: int, settings: Mapping[int, Any]) -> MemberStart:
        if parent == member:
            return MemberStart(member, parent, settings[member], settings[member], "kept")
        random = self._random(interval, member)
        explored = self.space.explore(self.job, settings[parent], random, resample=self.plan.resample)
        return MemberStart(member, parent, settings[member], explored, "cloned")

    def _random(self, interval: int, what: object) -> Random:
        return Random(f"{self.plan.seed}/{interval}/{what}")


def _explorable(space: Space, job: Job) -> Explorable:
    if isinstance(space, Mapping):
        return Ranges(space, job) if any(map(_is_of_ranges, space, space.values())) else _of_study(space, job)
    return Conditional(space, job) if isinstance(space, spec.Space) else space


def _of_study(space: Mapping[str, Any], job: Job) -> Conditional:
    return Conditional(spec.Space(parameters=dict(space)), job)


def _is_of_ranges(path: str, value: Any) -> bool:
    """Return whether an entry of a space can be represented by `Ranges` only.

    Such entries are choices among whole parts of a job, and fields unknown to `Space`.
    """
    head, _, leaf = path.partition(".")
    is_part = isinstance(value, list) and any(isinstance(choice, Spec | Mapping) for choice in value)
    return is_part or leaf == "name" or bool(leaf and head in MAY_CHANGE and head not in spec.BRANCHES)


def _check(*, members: int, intervals: int, quantile: float, resample: float, at_once: int) -> None:
    for name, value, least in (("members", members, 2), ("intervals", intervals, 1), ("at_once", at_once, 1)):
        if value < least:
            raise SpecError(f"{name}={value} is too few; use at least {least}")
    if not 0 < quantile <= 0.5:
        raise SpecError(
            f"quantile={quantile} is not a valid fraction of the members to replace; use more than 0, at most 0.5"
        )
    if not 0 <= resample <= 1:
        raise SpecError(f"resample={resample} is not a probability; use 0 to 1")


def _interval_steps(job: Job, intervals: int, interval_steps: int | None) -> int:
    steps = job.steps // intervals if interval_steps is None else interval_steps
    if steps < 1:
        given = (
            f"steps={job.steps} over intervals={intervals}"
            if interval_steps is None
            else f"{interval_steps=}"
        )
        raise SpecError(f"{given} leaves no steps for an interval; give interval_steps of at least 1")
    return steps


def _folder(job: Job, folder: str | Path | None) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.label).strip("-.")
    path = (
        Path(folder)
        if folder is not None
        else runs_root() / f"{time.strftime('%Y%m%d-%H%M%S')}-population-{name}"
    )
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path.absolute()


def _difference(folder: Path, old: Plan, new: Plan) -> str:
    """Return a sentence on how the existing population in the folder differs from the requested population."""
    field = next(name for name in vars(old) if getattr(old, name) != getattr(new, name))
    had, has = getattr(old, field), getattr(new, field)
    if isinstance(had, Mapping):
        key = next(key for key in {**had, **has} if had.get(key) != has.get(key))
        field, had, has = f"{field}[{key!r}]", had.get(key), has.get(key)
    return (
        f"the population in {folder} was created with {field}={had!r}, not {has!r}; resume with the original "
        "value, or give a different folder"
    )
