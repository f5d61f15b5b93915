"""A study and its driver, as a session, which widgets hold and `tune` runs to its end.

session = StudySession.open(job, space, trials=40) creates or resumes the study
session.run()                                      runs all trials; or call `session.driver.tick()` yourself
session.records(), session.front()                 results so far, at any time, also from another process
"""

from __future__ import annotations

import logging
import operator
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, get_args

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage

from shardscope.errors import SpecError, StudyError, quoted, unknown_name
from shardscope.runtime.record.run import Run
from shardscope.spec import Job
from shardscope.spec.job_parts import label_of
from shardscope.spec.space import Space
from shardscope.tuning import records as rows
from shardscope.tuning.apply import MemoryLimit, apply, check_rows, checked_rows
from shardscope.tuning.definition import Definition, code_of, named_objectives
from shardscope.tuning.driver import Pruner, TrialDriver
from shardscope.tuning.measured import Objective
from shardscope.tuning.noise_probe import BatchesAround, resolve_batch_range
from shardscope.tuning.objectives import DEFAULT_OBJECTIVES
from shardscope.tuning.priors import EqualBudgets, default_space, optimizers_of, seeds, with_baselines
from shardscope.tuning.pruning.halving import Rungs, agreed, rungs_of
from shardscope.tuning.pruning.pruners import ByOptuna, pruner_of
from shardscope.tuning.pruning.rungs import HalvingDriver
from shardscope.tuning.records import PINNED, TrialRecord, TrialWriter, check_trials
from shardscope.tuning.report import StudyReport, report_of
from shardscope.tuning.samplers import check_storage, sampler_of
from shardscope.tuning.seeding import queue_seeds
from shardscope.tuning.storage import (
    answering,
    create_or_load,
    definition_of,
    folder_of,
    journal_of,
    journals_of,
    open_storage,
    place_of,
    without_password,
)

DEFAULT_TRIALS = 40
_TRIALS = "trials"
"""Attribute of the study that holds its number of trials."""
_MOST_TRIALS = 1_000_000
_MOST_PARALLEL = 1024
_MOST_SEED = 2**32 - 1


@dataclass
class StudySession:
    """One study, and the driver that runs its trials in this process.

    Attributes:
        study: The Optuna study.
        definition: Job, search space and objectives of the study.
        driver: Driver that runs the trials; nothing runs until `run` or `driver.tick` is called.
        folder: Folder of the study on this machine.
        storage: The storage as passed by the caller; None for the journal file in `folder`.
    """

    study: optuna.Study
    definition: Definition
    driver: TrialDriver
    folder: Path
    storage: str | BaseStorage | None = None

    @classmethod
    def open(  # noqa: C901 - a step for each part of a study
        cls,
        job: Job | None = None,
        space: Space | Mapping[str, Any] | None = None,
        *,
        trials: int | None = None,
        objectives: Sequence[str] | Mapping[str, Objective | None] | None = None,
        name: str | None = None,
        storage: str | BaseStorage | None = None,
        sampler: str | BaseSampler = "auto",
        pruner: str | BasePruner | Pruner | None = None,
        promote: int | Rungs | None = None,
        parallel: int = 1,
        equal: Literal["samples", "steps"] = "samples",
        baselines: bool = True,
        memory_limit: float | None = None,
        seed: int = 0,
        root: str | Path | None = None,
        batch_range: BatchesAround = "noise",
        stopping: threading.Event | None = None,
        on_probe: Callable[[Job], None] | None = None,
    ) -> Self:
        """Create a study, or resume the one with this name; the arguments are the same as for `tune`.

        Without a space, the call blocks until the run that measures the noise scale has ended. `on_probe` is called
        with the job of that run when it starts. The run is stopped if `stopping` is set.

        Raises:
            NotMeasured: `stopping` was set before the noise scale was measured; no study was created.
            SpecError: The space or an objective is invalid.
            StudyError: The storage is unreachable, or holds a different study with this name.
        """
        trials = None if trials is None else _whole("trials", trials, 1, _MOST_TRIALS)
        parallel, seed = _whole("parallel", parallel, 1, _MOST_PARALLEL), _whole("seed", seed, 0, _MOST_SEED)
        check_storage(sampler, storage)
        names, own = named_objectives(DEFAULT_OBJECTIVES if objectives is None else objectives)
        if job is None:
            held, name = _stored(name, storage, root)
            definition = _define(
                held.job, held.space if space is None else space, held.objectives if objectives is None else names,
                held.own if objectives is None else own, held.equal if equal == "samples" else equal,
                baselines=held.baselines, code=held.code,
            )  # fmt: skip
            definition = definition.replace(drawn=held.drawn) if space is None else definition
        else:
            if isinstance(job, Job):
                job.require_code()
            definition = _define(job, space, names, own, equal, baselines=baselines)
            checked_rows(definition.job)
            check_rows(definition.job, definition.space)
            name = name or f"{label_of(job.model)}-{job.strategy.name}"
        place_of(name, root)  # rejects an invalid name before anything is created
        chosen = sampler_of(sampler, seed=seed, num_objectives=len(definition.objectives))
        rungs = None if promote is None else rungs_of(promote, definition)
        pruner_of(pruner, definition)  # rejects an invalid pruner before a study is created
        if batch_range not in get_args(BatchesAround):
            raise unknown_name("batch_range", batch_range, get_args(BatchesAround))
        opened, limit = open_storage(storage, name, root), MemoryLimit(memory_limit)
        folder = folder_of(name, root)
        if job is not None and space is None:
            definition = resolve_batch_range(
                definition, opened, name, folder, around_what=batch_range, limit=limit, stopping=stopping,
                on_probe=on_probe,
            )  # fmt: skip
        with _quiet(), answering(name):
            study, is_new = create_or_load(opened, name, definition, chosen)
            if not is_new:
                begun = definition_of(opened, name)
                check_trials(study.get_trials(deepcopy=False), begun.space, study=name)
                definition = definition.with_batches_of(begun)
                definition = definition.replace(batch_range=begun.batch_range, drawn=begun.drawn)
            if not is_new and isinstance(sampler, str):
                study.sampler.reseed_rng()  # else it would repeat the samples of the previous driver
            seed_it = partial(_seed, study, TrialWriter(opened, name), definition, is_creator=is_new)
            if is_new:
                seed_it()  # other drivers queue seeds when they start to run trials: opening a study changes nothing
        missing = [n for n in definition.own if n not in own]
        if missing:
            raise StudyError(
                f"study {name!r} has the user-defined objectives {', '.join(missing)}; pass them again in objectives"
            )
        trials = _agreed_trials(study, trials)
        writer = TrialWriter(opened, name)
        if rungs is not None or not is_new:
            rungs = agreed(study, rungs)
        judge = pruner_of(pruner, definition, promotes=rungs is not None)
        if isinstance(judge, ByOptuna):
            study.pruner = judge.pruner
        kind = TrialDriver if rungs is None else partial(HalvingDriver, rungs=rungs)
        driver = kind(
            study, writer, definition, trials, folder / "trials", own, parallel, pruner=judge,
            feasibility=limit,
            choose=EqualBudgets(definition.space, definition.drawn) if definition.baselines else None,
            seed=None if is_new else partial(_prepare_resumed, definition, seed_it, study=name),
        )  # fmt: skip
        return cls(study, definition, driver, folder, storage)

    # Running.

    def run(
        self, *, timeout_s: float | None = None, on_tick: Callable[[StudySession], None] | None = None
    ) -> None:
        """Run trials until the study is complete. An interrupt stops the study, which can be resumed without loss.

        Args:
            timeout_s: Stop after this many seconds; the study can be resumed later. None sets no limit.
            on_tick: Called with the session many times a second.
        """
        with _quiet():
            self.driver.run(timeout_s=timeout_s, on_tick=None if on_tick is None else lambda: on_tick(self))

    # Results.

    def records(self) -> list[TrialRecord]:
        """Return the records of all trials, sorted by number."""
        wanted = max(
            self.driver.trials, int(self.study.user_attrs.get(_TRIALS, 0))
        )  # another session may have requested more
        return rows.records_of(self.study, self.definition.space, self.definition.objectives, wanted=wanted)

    def front(self) -> list[TrialRecord]:
        """Return the complete trials on the Pareto front, except trials that are on it only because of timing noise."""
        records = self.records()
        clear = rows.front(records).clear
        return [record for record in records if record.number in clear]

    def report(self) -> StudyReport:
        """Return the report: the best optimizer, the number of trials per optimizer, and alarms about layers."""
        return report_of(self.study.study_name, self.records(), self.definition)

    def record(self, number: int) -> TrialRecord:
        """Return the record of one trial.

        Raises:
            StudyError: The study has no trial with this number.
        """
        records = self.records()
        found = [record for record in records if record.number == number]
        if not found:
            known = f"give 0 to {len(records) - 1}" if records else "it has none yet"
            raise StudyError(f"study {self.study.study_name!r} has no trial {number}; {known}")
        return found[0]

    def job(self, number: int) -> Job:
        """Return the job of a trial, for example to launch it again or to modify it."""
        return apply(self.definition.job, self.record(number).params, equal=self.definition.equal)

    def trial_run(self, number: int) -> Run:
        """Return the run of a trial.

        Raises:
            StudyError: The trial has no run directory on this machine.
        """
        record = self.record(number)
        if record.run is None or not Path(record.run).is_dir():
            raise StudyError(
                f"trial {number} ({record.state}) has no run directory on this machine; read it on the machine that "
                "ran it, or launch its job again"
            )
        return Run.attach(record.run)

    @property
    def where(self) -> str:
        """Location of the study: the path of its journal, or the URL of its storage without the password."""
        if self.storage is None:
            return str(journal_of(self.folder))
        return without_password(self.storage) if isinstance(self.storage, str) else repr(self.storage)

    def dashboard_command(self) -> str:
        """Return the command that opens the study in Optuna's dashboard (``pip install optuna-dashboard``).

        The dashboard also works while the study is running.

        Raises:
            StudyError: The storage was given as an Optuna object, which a shell command cannot name.
        """
        if isinstance(self.storage, BaseStorage):
            raise StudyError(
                f"storage={self.where} cannot be written in a shell command; pass its URL as storage"
            )
        return shlex.join(["optuna-dashboard", self.where])

    def pin(self, number: int, is_pinned: bool = True) -> None:
        """Pin or unpin a trial; the pin is stored with the study and visible to everybody who opens it."""
        self.record(number)
        self.study.set_user_attr(
            f"{PINNED}:{number}", is_pinned
        )  # one attribute per trial, so none is overwritten


def _prepare_resumed(definition: Definition, seed_it: Callable[[], None], *, study: str) -> None:
    """Check the code of a resumed study and queue its missing seeds, before its driver runs trials."""
    definition.require_code(study=study)
    seed_it()


def _seed(study: optuna.Study, writer: TrialWriter, definition: Definition, *, is_creator: bool) -> None:
    """Queue the settings that the study is to run first, if it includes baselines."""
    if definition.baselines:
        found = seeds(definition.job, definition.space, definition.objectives, drawn=definition.drawn)
        queue_seeds(study, writer, found, definition.space, is_creator=is_creator)


def _agreed_trials(study: optuna.Study, trials: int | None) -> int:
    """Return `trials` if given, and store it in the study; else return the stored number of trials."""
    held = study.user_attrs.get(_TRIALS)
    if trials is not None and trials != held:
        study.set_user_attr(_TRIALS, trials)
    return trials or int(held or DEFAULT_TRIALS)


def _whole(field: str, value: object, least: int, most: int) -> int:
    """Return `value` as an int; NumPy integers are accepted.

    Raises:
        SpecError: The value is not an integer, or is out of range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise SpecError(f"{field}={quoted(value)} is not valid; use an integer from {least} to {most}")
    return number


def _define(
    job: Job,
    space: Space | Mapping[str, Any] | None,
    objectives: tuple[str, ...],
    own: Iterable[str],
    equal: Literal["samples", "steps"],
    *,
    baselines: bool,
    code: Mapping[str, str] | None = None,
) -> Definition:
    """Return the requested definition. `code` contains the study's stored code digests; None computes them now."""
    if not isinstance(job, Job):
        raise SpecError(f"tune takes a Job, got {type(job).__name__}; write ss.tune(ss.Job(...))")
    if space is None:
        space = default_space(job)
    elif not isinstance(space, Space):
        space = Space(parameters=dict(space))
    drawn = optimizers_of(space) if baselines else None
    if baselines:
        space = with_baselines(space)
    return Definition(
        job=job, space=space, objectives=objectives, own=tuple(own), equal=equal, baselines=baselines, drawn=drawn,
        code=code_of(job, space) if code is None else dict(code),
    )  # fmt: skip


def _stored(
    name: str | None, storage: str | BaseStorage | None, root: str | Path | None
) -> tuple[Definition, str]:
    """Return the definition and the name of an existing study."""
    if name is None:
        raise SpecError("tune needs a job, or the name of a study to resume; write ss.tune(job)")
    if storage is None and not journal_of(place_of(name, root)).is_file():
        raise StudyError(
            f"there is no study {name!r} here; existing studies: {', '.join(journals_of(root)) or 'none'}"
        )
    opened = open_storage(storage, name, root)
    try:
        with answering(name):
            return definition_of(opened, name), name
    except KeyError:
        known = ", ".join(optuna.get_all_study_names(opened)) or "none"
        raise StudyError(f"there is no study {name!r} in this storage; it contains {known}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's log line for each trial, because the study prints its own line."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
