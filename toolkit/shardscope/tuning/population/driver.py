"""The driver of a population: in each interval it trains all members, scores them and decides on the next interval.

It keeps no state outside the journal, and every random decision depends only on the seed, the interval and the member.
So training the same population in the same folder again resumes it, however it ended.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from shardscope._experimental import experimental
from shardscope.errors import SpecError
from shardscope.runtime import Run
from shardscope.runtime.record.rundir import runs_root
from shardscope.spec import Job
from shardscope.spec import space as spec
from shardscope.spec._base import Spec
from shardscope.tuning.measured import Objective
from shardscope.tuning.population.conditional import Conditional
from shardscope.tuning.population.exploit import choose_parents
from shardscope.tuning.population.explore import Explorable, Ranges
from shardscope.tuning.population.journal import NAME, Journal, read_lines
from shardscope.tuning.population.members import Stopped, Trainee, drop_checkpoints, job_of, train_all
from shardscope.tuning.population.objectives import costs_of, objectives_of
from shardscope.tuning.population.record import (
    Course,
    MemberStart,
    Outcome,
    Plan,
    PopulationError,
    moves_line,
    outcome_line,
    plan_line,
)
from shardscope.tuning.population.settings import MAY_CHANGE
from shardscope.tuning.population.view import Population

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
        quantile: Fraction of the members that copy others after an interval, 0 < value <= 0.5.
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
    names, own = objectives_of(objectives)
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
        _Driver(job, known, plan, journal, at_once, timeout_s, own).run()
    return Population(path)


@dataclass
class _Driver:
    """Driver that continues one population from the end of its journal."""

    job: Job
    space: Explorable
    plan: Plan
    journal: Journal
    at_once: int
    timeout_s: float | None
    own: Mapping[str, Objective]

    def __post_init__(self) -> None:
        self.folder = self.journal.path.parent
        self.course = Course.of(read_lines(self.journal.path))
        self.stop_request = Population(self.folder).stop_request

    def run(self) -> None:
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
        """Train all members that have not completed this interval, then conclude it."""
        if self.course.is_over(interval):
            self._conclude(interval)
            return
        if interval not in self.course.moves:
            self._write(moves_line(interval, self._moves(interval)))
        self._drop_losers(interval)
        left = [
            move
            for move in self.course.moves[interval]
            if (interval, move.member) not in self.course.outcomes
        ]
        train_all(
            [self._trainee(interval, move) for move in left], at_once=self.at_once,
            asked_to_stop=self.stop_request.exists, on_outcome=lambda outcome: self._write(outcome_line(outcome)),
        )  # fmt: skip
        self._conclude(interval)

    def _trainee(self, interval: int, move: MemberStart) -> Trainee:
        job = job_of(self.space.apply(self.job, move.settings), self.plan, interval, move.member)
        parent = None
        if move.parent is not None:
            parent = Run.attach(self.folder / self.course.outcomes[interval - 1, move.parent].run)
        return Trainee(
            self.folder, interval, move, job, parent, self.plan.objectives, self.timeout_s, self.own
        )  # fmt: skip

    def _drop_losers(self, interval: int) -> None:
        """Delete the previous interval's checkpoints that no member resumes from, according to the moves."""
        parents = {move.parent for move in self.course.moves[interval]}
        runs = {outcome.run for outcome in self.course.outcomes.values()
                if outcome.interval == interval - 1 and outcome.member in parents}  # fmt: skip
        drop_checkpoints(self.folder, interval - 1, but_of=runs)

    def _conclude(self, interval: int) -> None:
        drop_checkpoints(self.folder, interval - 1)
        outcomes = self._outcomes(interval)
        if all(outcome.scores is None for outcome in outcomes):
            raise PopulationError(
                f"all {len(outcomes)} members failed in interval {interval}; the first: {outcomes[0].failure}"
            )
        if interval == self.plan.intervals:
            front = Population(self.folder).front
            drop_checkpoints(
                self.folder, interval, but_of=[e.outcome.run for e in front if e.outcome is not None]
            )

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
            outcome.member: None if outcome.scores is None else costs_of(outcome.scores, self.plan.objectives)
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
    """Return a sentence that states how the existing population in the folder differs from the requested one."""
    if old.split != new.split:
        return (
            f"the population in {folder} compared its members on the test split, as earlier versions did, but they are "
            "now compared on the validation split; its results can still be read, but training needs a different folder"
        )
    field = next(name for name in vars(old) if getattr(old, name) != getattr(new, name))
    had, has = getattr(old, field), getattr(new, field)
    if isinstance(had, Mapping):
        key = next(key for key in {**had, **has} if had.get(key) != has.get(key))
        field, had, has = f"{field}[{key!r}]", had.get(key), has.get(key)
    return (
        f"the population in {folder} was created with {field}={had!r}, not {has!r}; resume with the original "
        "value, or give a different folder"
    )
