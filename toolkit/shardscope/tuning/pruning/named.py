"""Pruners by short names: dominance, and Optuna's own for studies of one objective.

Optuna's judge a trial against others at the same step. Trials of other batches have other steps, so what they are told
as the step is the number of evaluations so far; every trial of a study has about as many.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import Job
from shardscope.tuning.definition import Definition
from shardscope.tuning.driver import Live, Pruner
from shardscope.tuning.measured import evaluated
from shardscope.tuning.objectives import QUALITIES
from shardscope.tuning.pruning.dominance import Dominance

_STARTUP = 4
"""Trials that finish before any is pruned."""
_LEARNS_AT_FIRST = 3
"""Of a trial's evaluations, the part before it is compared: a rate that still warms up looks bad early."""
_KEPT = 25.0
_PATIENCE = 2


def _warm_up(evaluations: int) -> int:
    return max(1, evaluations // _LEARNS_AT_FIRST)


def _median(evaluations: int) -> BasePruner:
    return optuna.pruners.MedianPruner(n_startup_trials=_STARTUP, n_warmup_steps=_warm_up(evaluations))


def _percentile(evaluations: int) -> BasePruner:
    return optuna.pruners.PercentilePruner(
        _KEPT, n_startup_trials=_STARTUP, n_warmup_steps=_warm_up(evaluations)
    )


def _hyperband(evaluations: int) -> BasePruner:
    return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=evaluations, reduction_factor=3)


def _halving(_: int) -> BasePruner:
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)


def _patient(evaluations: int) -> BasePruner:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # said in `PRUNERS`
        return optuna.pruners.PatientPruner(_median(evaluations), patience=_PATIENCE)


PRUNERS: Mapping[str, tuple[Callable[[int], BasePruner] | None, str]] = {
    "dominance": (None, "stops what a finished trial beats in all it may come to; the default for several objectives"),
    "median": (_median, "stops what is worse than the median was by then; the default for one objective"),
    "percentile": (_percentile, "the same, with the best quarter in place of the median"),
    "hyperband": (_hyperband, "successive halving in brackets, some stricter than others"),
    "successive-halving": (_halving, "the best third goes on at 1, 3, 9 evaluations; the others stop for good"),
    "patient": (_patient, "the median's, once a trial has not improved for two evaluations; experimental in Optuna"),
    "none": (None, "every trial runs to its end"),
}  # fmt: skip
"""By name: how to make one of Optuna's for so many evaluations a trial, and when to use it."""


def pruner_of(
    pruner: str | BasePruner | Pruner | None, definition: Definition, *, promotes: bool = False
) -> Pruner | None:
    """The pruner of this name, or the one given; None for what suits the study.

    Raises:
        SpecError: There is none of this name, or it cannot judge these objectives.
    """
    name = _default(definition, promotes=promotes) if pruner is None else pruner
    if not isinstance(name, str):
        return (
            ByOptuna.judging(name, type(name).__name__, definition) if isinstance(name, BasePruner) else name
        )
    if name not in PRUNERS:
        raise unknown_name("pruner", name, PRUNERS)
    if name == "none":
        return None
    make = PRUNERS[name][0]
    if make is None:
        return Dominance(definition)
    return ByOptuna.judging(make(_evaluations(definition.job)), repr(name), definition)


def _default(definition: Definition, *, promotes: bool) -> str:
    if len(definition.objectives) == 1:
        return "none" if promotes or definition.own else "median"
    return "none" if definition.own else "dominance"


def _evaluations(job: Job) -> int:
    every = evaluated(job).eval_every
    return -(-job.steps // (every or job.steps))


@dataclass
class ByOptuna:
    """One of Optuna's pruners, told the loss or error of a trial at each of its evaluations.

    `study.pruner` must be `pruner`: samplers and trials look for it there.
    """

    pruner: BasePruner
    name: str
    objective: str
    reported: dict[int, int] = field(default_factory=dict)

    @classmethod
    def judging(cls, pruner: BasePruner, name: str, definition: Definition) -> ByOptuna | None:
        """The pruner for a study's one objective; None for the one that never prunes.

        Raises:
            SpecError: The objectives are several, or one that is known only at the end.
        """
        if isinstance(pruner, optuna.pruners.NopPruner):
            return None
        if len(definition.objectives) > 1:
            raise SpecError(
                f"pruner={name} judges one objective, got {', '.join(definition.objectives)}; use 'dominance', or one "
                "objective"
            )
        if definition.objectives[0] not in QUALITIES:
            raise SpecError(
                f"pruner={name} judges loss or error as it falls, and {definition.objectives[0]!r} is known when a run "
                "has ended; use pruner='none'"
            )
        return cls(pruner, name, definition.objectives[0])

    @property
    def _column(self) -> int:
        return 1 + QUALITIES.index(self.objective)

    def report(self, live: Live) -> None:
        """Tell the study of evaluations that it does not know of yet."""
        curve = live.measured.curve
        for index in range(self.reported.get(live.number, 0), len(curve)):
            live.trial.report(curve[index][self._column], index + 1)
            self.reported[live.number] = index + 1

    def reason(self, live: Live, _: list[FrozenTrial]) -> str | None:
        """Why Optuna would stop the trial, None if it would not."""
        self.report(live)
        curve = live.measured.curve
        if not curve or curve[-1][0] >= live.job.steps or not live.trial.should_prune():
            return None
        return (
            f"the pruner {self.name} stopped it at {curve[-1][0] / live.job.steps:.0%} of its samples: "
            f"{self.objective} {curve[-1][self._column]:.4g} is not among those that go on there"
        )
