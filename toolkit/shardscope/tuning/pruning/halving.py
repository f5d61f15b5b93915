"""Successive halving on checkpoints: which trials go on at each rung, as pure functions of what a study holds.

Every trial is trained to the first rung, a small share of its samples, and paused there. The best of those that came
to a rung go on to the next from their checkpoint, so no step is taken twice; the others are pruned when the study
ends. As in asynchronous halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", Algorithm
2) nobody waits until a rung is full: a trial is promoted as soon as it is among the best `1/eta` of those there.

What a trial's state is, is in its attributes: ``paused`` names the rung it came to and the runs of its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from shardscope.errors import SpecError, StudyError
from shardscope.spec import Job
from shardscope.tuning.definition import Definition
from shardscope.tuning.measured import Measured
from shardscope.tuning.objectives import QUALITIES
from shardscope.tuning.population.exploit import ranked
from shardscope.tuning.pruning.curves import at, curve_of
from shardscope.tuning.pruning.outlook import expected
from shardscope.tuning.records import MEASURED, PAUSED, measured_from, not_counted

_RUNGS = "rungs"
"""The study's attribute."""


@dataclass(frozen=True)
class Rungs:
    """Where trials pause: at a share of `least` of their samples, then at `eta` times as many each.

    Args:
        eta: One in `eta` trials goes on at every rung; a whole number of at least 2.
        least: Share of the samples that every trial is given, 0 < value < 1.

    Raises:
        SpecError: One is out of its range.

    Example:
        >>> Rungs(eta=3).untils(90)
        (10, 30, 90)
    """

    eta: int = 3
    least: float = 1 / 9

    def __post_init__(self) -> None:
        if not isinstance(self.eta, int) or isinstance(self.eta, bool) or self.eta < 2:
            raise SpecError(
                f"promote: eta={self.eta!r} is not a reduction factor; use a whole number of at least 2"
            )
        if not 0 < self.least < 1:
            raise SpecError(
                f"promote: least={self.least!r} is not a share of the samples; use more than 0, less than 1"
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the samples, by rung; the last is 1."""
        count = math.ceil(math.log(1 / self.least) / math.log(self.eta) - 1e-9)
        return (*(self.least * self.eta**rung for rung in range(count)), 1.0)

    def untils(self, steps: int) -> tuple[int, ...]:
        """The step at which a trial of `steps` steps pauses, by rung; at the last it has ended."""
        return tuple(
            min(steps, max(rung + 1, round(share * steps))) for rung, share in enumerate(self.shares)
        )


def rungs_of(promote: int | Rungs, definition: Definition) -> Rungs:
    """What was asked for; a number is `Rungs.eta`.

    Raises:
        SpecError: An objective is a function of the user's, which is known only when a run has ended.
    """
    if definition.own:
        raise SpecError(
            f"promote={promote!r} ranks trials on their way, and {definition.own[0]!r} is a function of yours, "
            "known when a run has ended; leave it out"
        )
    return promote if isinstance(promote, Rungs) else Rungs(eta=promote)


def agreed(study: optuna.Study, rungs: Rungs | None) -> Rungs | None:
    """The rungs of a study: those that it was begun with, else those asked for now, which it then keeps.

    Raises:
        StudyError: It was begun with others.
    """
    held = study.user_attrs.get(_RUNGS)
    if held is None:
        if rungs is not None:
            study.set_user_attr(_RUNGS, {"eta": rungs.eta, "least": rungs.least})
        return rungs
    if rungs not in (None, Rungs(**held)):
        raise StudyError(
            f"study {study.study_name!r} promotes one in {held['eta']} from {held['least']:.3g} of the samples on; go "
            "on with that by leaving promote out, or give the study another name"
        )
    return Rungs(**held)


@dataclass(frozen=True)
class Paused:
    """How far a trial has come in whole pieces, as its attribute says.

    Attributes:
        rung: That it came to, from 0.
        steps: Of the whole trial.
        runs: Paths of the runs of its pieces; the last has the checkpoint to go on from.
        host: The machine that has them.
    """

    rung: int
    steps: int
    runs: tuple[str, ...]
    host: str

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Paused | None:
        """From a trial's attributes; None where it has not come to the first rung."""
        held = attrs.get(PAUSED)
        return None if held is None else cls(held["rung"], held["steps"], tuple(held["runs"]), held["host"])

    def to_attrs(self) -> dict[str, Any]:
        """As a trial's attribute."""
        return {PAUSED: {"rung": self.rung, "steps": self.steps, "runs": list(self.runs), "host": self.host}}


JobOf = Callable[[FrozenTrial], Job]
"""The job of a trial."""


def best(
    trials: Sequence[FrozenTrial], rung: int, rungs: Rungs, objectives: Sequence[str], job_of: JobOf
) -> list[int]:
    """The numbers of the trials that came to a rung, the best first.

    By what they had come to there: their quality at that share of the samples, and time, bytes and memory that the
    whole trial is expected to come to (`outlook`). With several objectives in the order of non-dominated fronts, those
    in sparse places first.
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
    """The trial to go on with next, of those `held` at a rung (by number); None where none is good enough.

    From the highest rung down.
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
    """The best of those held at the highest rung; None where none of them counts."""
    rung = max(held.values())
    order = best(trials, rung, rungs, objectives, job_of)
    return next((number for number in order if held.get(number) == rung), None)


def _steps(trial: FrozenTrial, measured: Measured, rung: int) -> int | None:
    """Steps of the whole trial, if it came to the rung."""
    paused = Paused.of(trial.user_attrs)
    if trial.state == TrialState.COMPLETE and measured.curve:
        return measured.curve[-1][0]
    return paused.steps if paused is not None and paused.rung >= rung else None


def _cost(name: str, measured: Measured, job: Job, until: int) -> float:
    if name in QUALITIES:
        value = at(curve_of(measured, name, job.steps), until / job.steps)
    else:
        value = expected(name, measured, job)
    return math.inf if value is None else value
