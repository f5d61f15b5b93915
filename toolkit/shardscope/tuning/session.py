"""A study with all that belongs to it: what a widget holds, and what `tune` runs to the end.

session = Session.open(job, space, trials=40)      begins the study, or goes on with it
session.run()                                      to the last trial; or call `session.driver.tick()` yourself
session.records(), session.front()                 what there is, at any moment, also from another process
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from shardscope.errors import SpecError, StudyError
from shardscope.runtime.run import Run
from shardscope.spec import Job
from shardscope.spec.space import Space
from shardscope.spec.user_code import label_of
from shardscope.tuning import records as rows
from shardscope.tuning.apply import apply
from shardscope.tuning.definition import Definition
from shardscope.tuning.driver import Driver, Objective, Pruner
from shardscope.tuning.feasible import MemoryLimit
from shardscope.tuning.ledger import Ledger
from shardscope.tuning.priors import EqualBudgets, default_space, enqueue, with_baselines
from shardscope.tuning.pruning.halving import Rungs, agreed, rungs_of
from shardscope.tuning.pruning.named import ByOptuna, pruner_of
from shardscope.tuning.pruning.rungs import HalvingDriver
from shardscope.tuning.records import PINNED, TrialRecord
from shardscope.tuning.report import Report, report_of
from shardscope.tuning.samplers import sampler_of
from shardscope.tuning.storage import answering, create_or_load, definition_of, folder_of, open_storage

_TICK_S = 0.02
DEFAULT_TRIALS = 40
_TRIALS = "trials"
"""The study's attribute that says how many it is to have."""
DEFAULT_OBJECTIVES = ("loss", "seconds", "bytes")


@dataclass
class Session:
    """One study, and the driver that runs its trials in this process."""

    study: optuna.Study
    definition: Definition
    driver: Driver
    folder: Path

    @classmethod
    def open(
        cls,
        job: Job | None = None,
        space: Space | Mapping[str, Any] | None = None,
        *,
        trials: int | None = None,
        objectives: Sequence[str] | Mapping[str, Objective | None] | None = None,
        name: str | None = None,
        storage: str | BaseStorage | None = None,
        sampler: str | BaseSampler = "tpe",
        pruner: str | BasePruner | Pruner | None = None,
        promote: int | Rungs | None = None,
        parallel: int = 1,
        equal: Literal["samples", "steps"] = "samples",
        baselines: bool = True,
        memory_limit: float | None = None,
        seed: int = 0,
        root: str | Path | None = None,
    ) -> Self:
        """Begin a study, or go on with the one of this name; the arguments are those of `tune`.

        Raises:
            SpecError: The space or an objective is impossible.
            StudyError: The storage does not answer, or holds another study of this name.
        """
        _check_counts(trials, parallel)
        own = (
            {n: f for n, f in objectives.items() if f is not None} if isinstance(objectives, Mapping) else {}
        )
        if job is None:
            definition, name = _stored(name, storage, root)
        else:
            definition = _define(job, space, objectives, own, equal, baselines=baselines)
            name = name or f"{label_of(job.model)}-{job.strategy.kind}"
        folder = folder_of(name, root)
        chosen = sampler_of(sampler, seed=seed, num_objectives=len(definition.objectives))
        rungs = rungs_of(promote, definition)
        pruner_of(pruner, definition)  # what is wrong with it is said before a study is begun
        opened = open_storage(storage, name, root)
        with _quiet(), answering(name):
            study, is_new = create_or_load(opened, name, definition, chosen)
            if not is_new and isinstance(sampler, str):
                study.sampler.reseed_rng()  # else it would draw again what the driver before it drew
            if baselines and (is_new or not _has_begun(study)):  # its maker may have been killed meanwhile
                enqueue(study, definition.job, definition.space)
        missing = [n for n in definition.own if n not in own]
        if missing:
            raise StudyError(
                f"study {name!r} minimises {', '.join(missing)} by functions of yours; give them again in objectives"
            )
        trials = _agreed_trials(study, trials)
        ledger = Ledger(opened, name)
        rungs = agreed(study, rungs)
        judge = pruner_of(pruner, definition, promotes=rungs is not None)
        if isinstance(judge, ByOptuna):
            study.pruner = judge.pruner
        kind = Driver if rungs is None else partial(HalvingDriver, rungs=rungs)
        driver = kind(
            study, ledger, definition, trials, folder / "trials", own, parallel, pruner=judge,
            feasibility=MemoryLimit(memory_limit),
            choose=EqualBudgets(definition.space) if baselines else None,
        )  # fmt: skip
        return cls(study, definition, driver, folder)

    # Running.

    def run(
        self, *, timeout_s: float | None = None, on_tick: Callable[[Session], None] | None = None
    ) -> None:
        """Run trials until the study has all it was to have; an interrupt stops it, and loses nothing.

        Args:
            timeout_s: Stop after this long; the study can go on later. None for as long as it takes.
            on_tick: Called many times a second.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with _quiet():
                while self.driver.tick():
                    if on_tick is not None:
                        on_tick(self)
                    if deadline is not None and time.monotonic() > deadline:
                        break
                    time.sleep(_TICK_S)
        finally:
            self.driver.stop()

    # What there is.

    def records(self) -> list[TrialRecord]:
        """All trials by number."""
        return rows.records_of(self.study, self.definition.space, self.definition.objectives)

    def front(self) -> list[TrialRecord]:
        """The complete trials that no other beats in everything."""
        return rows.front(self.records())

    def report(self) -> Report:
        """Who won, at which budget, and what did not work."""
        return report_of(self.study.study_name, self.records(), self.definition)

    def record(self, number: int) -> TrialRecord:
        """One trial.

        Raises:
            StudyError: There is none of this number.
        """
        found = [record for record in self.records() if record.number == number]
        if not found:
            raise StudyError(f"study {self.study.study_name!r} has no trial {number}")
        return found[0]

    def job(self, number: int) -> Job:
        """The job of a trial, to launch again or to change."""
        return apply(self.definition.job, self.record(number).params, equal=self.definition.equal)

    def trial_run(self, number: int) -> Run:
        """The run of a trial.

        Raises:
            StudyError: It has none on this machine.
        """
        record = self.record(number)
        if record.run is None or not Path(record.run).is_dir():
            raise StudyError(f"trial {number} ({record.state}) has no run directory on this machine")
        return Run.attach(record.run)

    def pin(self, number: int, is_pinned: bool = True) -> None:
        """Mark a trial, for everybody who looks at the study."""
        self.record(number)
        self.study.set_user_attr(f"{PINNED}:{number}", is_pinned)  # one each, so that nobody's is overwritten


def _agreed_trials(study: optuna.Study, trials: int | None) -> int:
    """As asked for now, which whoever goes on then takes up; else as the study has it."""
    held = study.user_attrs.get(_TRIALS)
    if trials is not None and trials != held:
        study.set_user_attr(_TRIALS, trials)
    return trials or int(held or DEFAULT_TRIALS)


def _check_counts(trials: int | None, parallel: int) -> None:
    for field, value in (("trials", 1 if trials is None else trials), ("parallel", parallel)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"{field}={value!r} is no number of trials; use a whole number of at least 1")


def _define(
    job: Job,
    space: Space | Mapping[str, Any] | None,
    objectives: Sequence[str] | Mapping[str, Objective | None] | None,
    own: Mapping[str, Objective],
    equal: Literal["samples", "steps"],
    *,
    baselines: bool,
) -> Definition:
    if not isinstance(job, Job):
        raise SpecError(f"tune takes a Job, got {type(job).__name__}; write ss.tune(ss.Job(...))")
    if isinstance(objectives, str):
        objectives = (objectives,)
    if space is None:
        space = default_space(job)
    elif not isinstance(space, Space):
        space = Space(parameters=dict(space))
    if baselines:
        space = with_baselines(space)
    names = tuple(DEFAULT_OBJECTIVES if objectives is None else objectives)
    return Definition(job=job, space=space, objectives=names, own=tuple(own), equal=equal)


def _has_begun(study: optuna.Study) -> bool:
    return any(trial.state != TrialState.WAITING for trial in study.get_trials(deepcopy=False))


def _stored(
    name: str | None, storage: str | BaseStorage | None, root: str | Path | None
) -> tuple[Definition, str]:
    """The definition of a study that is there already."""
    if name is None:
        raise SpecError("tune needs a job, or the name of a study to go on with; write ss.tune(job)")
    opened = open_storage(storage, name, root)
    try:
        with answering(name):
            return definition_of(optuna.load_study(storage=opened, study_name=name)), name
    except KeyError:
        known = ", ".join(optuna.get_all_study_names(opened)) or "none"
        raise StudyError(f"there is no study {name!r} in this storage; it has {known}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a line a trial on standard error; the study itself says more."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
