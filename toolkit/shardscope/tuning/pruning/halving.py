"""Successive halving with checkpoints: which trials to promote at each rung, as pure functions of a study's trials.

Every trial is trained to the first rung, a small fraction of its samples, and paused there. The best trials at a rung
resume from their checkpoint and train to the next rung, so no step is computed twice. The others are pruned when the
study ends. As in asynchronous halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning",
Algorithm 2), no trial waits until a rung is full: each is promoted as soon as it is among the best `1/eta` of the
trials that have reached its rung.

The state is stored in each trial's attributes: ``paused`` has the rung that the trial has reached and its runs so far.

A trial leaves a checkpoint at each rung that it reaches, and resumes from the last checkpoint. Earlier checkpoints are
not needed, nor is the last one once the trial has been pruned, or has failed without a successor. The study's records
show which checkpoints are not needed, so any driver can delete these at any time. If a driver is killed while it
deletes, the next driver continues.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from shardscope.errors import SpecError, StudyError
from shardscope.runtime.record.rundir import this_host
from shardscope.spec import Job
from shardscope.tuning.definition import Definition
from shardscope.tuning.measured import TrialMetrics
from shardscope.tuning.objectives import QUALITIES
from shardscope.tuning.population.exploit import ranked
from shardscope.tuning.pruning.outlook import at, curve_of, expected
from shardscope.tuning.records import DRIVER, MEASURED, PAUSED, RETRY_OF, RUN, measured_from, not_counted
from shardscope.tuning.recovery import LOST, is_among, successors

_RUNGS = "rungs"
"""Attribute of the study that holds its rungs."""


@dataclass(frozen=True)
class Rungs:
    """Rungs at which trials pause, as fractions of their samples: `least`, then `eta` times the previous fraction.

    Args:
        eta: Reduction factor, an integer of at least 2: one in `eta` trials is promoted at each rung.
        least: Fraction of the samples that every trial gets, 0 < value < 1.

    Raises:
        SpecError: A value is out of range.

    Example:
        >>> Rungs(eta=3).untils(90)
        (10, 30, 90)
    """

    eta: int = 3
    least: float = 1 / 9

    def __post_init__(self) -> None:
        if not isinstance(self.eta, int) or isinstance(self.eta, bool) or self.eta < 2:
            raise SpecError(
                f"promote: eta={self.eta!r} is not a reduction factor; use an integer of at least 2"
            )
        if not 0 < self.least < 1:
            raise SpecError(
                f"promote: least={self.least!r} is not a valid fraction of the samples; use more than 0 and less than 1"
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """Fraction of the samples at each rung; the last is 1."""
        count = math.ceil(math.log(1 / self.least) / math.log(self.eta) - 1e-9)
        return (*(self.least * self.eta**rung for rung in range(count)), 1.0)

    def untils(self, steps: int) -> tuple[int, ...]:
        """Return the step of each rung for a trial of `steps` steps, which pauses there and ends at the last rung."""
        return tuple(
            min(steps, max(rung + 1, round(share * steps))) for rung, share in enumerate(self.shares)
        )


def rungs_of(promote: int | Rungs, definition: Definition) -> Rungs:
    """Return the requested rungs.

    Args:
        promote: The rungs, or their reduction factor `Rungs.eta`.
        definition: Definition of the study.

    Raises:
        SpecError: An objective is user-defined, so its value is known only when a run has ended.
    """
    if definition.own:
        raise SpecError(
            f"promote={promote!r} ranks trials while they run, but objective {definition.own[0]!r} is user-defined and "
            "its value is known only when a run has ended; leave promote out"
        )
    return promote if isinstance(promote, Rungs) else Rungs(eta=promote)


def agreed(study: optuna.Study, rungs: Rungs | None) -> Rungs | None:
    """Return the rungs stored in a study; if there are none, store and return the requested ones.

    Raises:
        StudyError: The stored rungs differ from the requested ones.
    """
    held = study.user_attrs.get(_RUNGS)
    if held is None:
        if rungs is not None:
            study.set_user_attr(_RUNGS, {"eta": rungs.eta, "least": rungs.least})
        return rungs
    if rungs not in (None, Rungs(**held)):
        raise StudyError(
            f"study {study.study_name!r} already promotes one trial in {held['eta']}, from {held['least']:.3g} of the "
            "samples onwards; leave promote out to keep these rungs, or give the study another name"
        )
    return Rungs(**held)


@dataclass(frozen=True)
class Paused:
    """Progress of a paused trial, as stored in its attribute.

    Attributes:
        rung: Rung that the trial has reached, from 0.
        steps: Number of steps of the whole trial.
        runs: Paths of its runs so far, one per piece; the last run has the checkpoint to resume from.
        host: Machine on which these runs are stored.
    """

    rung: int
    steps: int
    runs: tuple[str, ...]
    host: str

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Paused | None:
        """Return the progress from a trial's attributes; None if it has not reached the first rung."""
        held = attrs.get(PAUSED)
        return None if held is None else cls(held["rung"], held["steps"], tuple(held["runs"]), held["host"])

    def to_attrs(self) -> dict[str, Any]:
        """Return the progress as an attribute of a trial."""
        return {PAUSED: {"rung": self.rung, "steps": self.steps, "runs": list(self.runs), "host": self.host}}


JobOf = Callable[[FrozenTrial], Job]
"""Function that returns the job of a trial."""


def best(
    trials: Sequence[FrozenTrial], rung: int, rungs: Rungs, objectives: Sequence[str], job_of: JobOf
) -> list[int]:
    """Return the trials that reached a rung, as trial numbers, best first.

    Trials are compared by their quality at the rung's fraction of the samples, and by the expected time, bytes and
    memory of the whole trial (`outlook`). With several objectives, they are sorted by non-dominated fronts and, within
    a front, by crowding distance.
    """
    costs: dict[int, tuple[float, ...]] = {}
    for trial in trials:
        measured = measured_from(trial.user_attrs.get(MEASURED))
        if not_counted(trial) is not None or trial.state == TrialState.FAIL or measured is None:
            continue
        steps = _steps(trial, measured, rung)
        if steps is not None:
            until = rungs.untils(steps)[rung]
            job = job_of(trial)
            costs[trial.number] = tuple(_cost(name, measured, job, until) for name in objectives)
    return ranked(costs)


def promotable(
    trials: Sequence[FrozenTrial],
    held: Mapping[int, int],
    rungs: Rungs,
    objectives: Sequence[str],
    job_of: JobOf,
) -> int | None:
    """Return the next trial to promote; None if no trial is good enough. Higher rungs come first.

    Args:
        trials: All trials of the study.
        held: Rung of each paused trial that may be promoted, by trial number.
        rungs: The rungs of the study.
        objectives: Names of the objectives.
        job_of: Returns the job of a trial.
    """
    for rung in sorted(set(held.values()), reverse=True):
        order = best(trials, rung, rungs, objectives, job_of)
        for number in order[: len(order) // rungs.eta]:
            if held.get(number) == rung:
                return number
    return None


def furthest(
    trials: Sequence[FrozenTrial],
    held: Mapping[int, int],
    rungs: Rungs,
    objectives: Sequence[str],
    job_of: JobOf,
) -> int | None:
    """Return the best trial among those paused at the highest rung; None if none of these can be ranked."""
    rung = max(held.values())
    order = best(trials, rung, rungs, objectives, job_of)
    return next((number for number in order if held.get(number) == rung), None)


def _steps(trial: FrozenTrial, measured: TrialMetrics, rung: int) -> int | None:
    """Return the number of steps of the whole trial; None if the trial has not reached the rung."""
    paused = Paused.of(trial.user_attrs)
    if trial.state == TrialState.COMPLETE and measured.curve:
        return measured.curve[-1][0]
    return paused.steps if paused is not None and paused.rung >= rung else None


def _cost(name: str, measured: TrialMetrics, job: Job, until: int) -> float:
    if name in QUALITIES:
        value = at(curve_of(measured, name, job.steps), until / job.steps)
    else:
        value = expected(name, measured, job)
    return math.inf if value is None else value


def unneeded(trials: Sequence[FrozenTrial]) -> set[str]:
    """Return the paths of the runs on this machine whose checkpoints no trial of the study will need any more."""
    heirs = successors(list(trials))
    found: set[str] = set()
    needed: set[str] = set()
    for trial in trials:
        found.update(_pieces(trial))
        if trial.state == TrialState.COMPLETE:
            needed.add(trial.user_attrs.get(RUN, ""))  # its checkpoint is a result of the study
        elif not _has_ended(trial, heirs):
            needed.update(_resumable_runs(trial))
    return found - needed


def delete(run: str, folder: Path) -> None:
    """Delete the checkpoints of a run if it lies in `folder`, the driver's folder of trials; keep all other files."""
    if is_among(run, folder):
        shutil.rmtree(Path(run) / "checkpoints", ignore_errors=True)


def _pieces(trial: FrozenTrial) -> Iterator[str]:
    """Yield the paths of a trial's runs on this machine."""
    paused = Paused.of(trial.user_attrs)
    if paused is not None and paused.host == this_host():
        yield from paused.runs
    if (trial.user_attrs.get(DRIVER) or {}).get("host") == this_host() and RUN in trial.user_attrs:
        yield trial.user_attrs[RUN]


def _has_ended(trial: FrozenTrial, heirs: Mapping[int, list[int]]) -> bool:
    """Return whether the trial has ended for good, so that neither it nor a successor will resume."""
    if not trial.state.is_finished():
        return False
    earlier = trial.user_attrs.get(RETRY_OF)
    is_surplus = earlier is not None and heirs[earlier][0] != trial.number
    return not_counted(trial) != LOST or trial.number in heirs or is_surplus


def _resumable_runs(trial: FrozenTrial) -> Iterator[str]:
    """Yield the paths of runs from which the trial may resume: the run of its last complete rung, then its newest."""
    paused = Paused.of(trial.user_attrs)
    if paused is not None:
        yield paused.runs[-1]
    if RUN in trial.user_attrs:
        yield trial.user_attrs[RUN]
