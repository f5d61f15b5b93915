"""Pruners by short names: dominance, and Optuna's own pruners for studies with one objective.

The dominance pruner stops a running trial if a finished trial dominates its optimistic point, the best result that the
running trial can be expected to reach. Time, bytes and memory of a trial are known after a few steps; only its quality
needs the whole run. So at every evaluation the optimistic point has

- the quality that the trial reaches if it improves as much as the best improver among the study's finished trials did
  from the same fraction of its samples (`curves`), or 1.5 times as much in a comparison with a finished trial that is
  not cheaper;
- the time and bytes of the whole trial at its current pace.

If a finished trial is at least as good as that point in every objective and better in one, the running trial is
unlikely to end on the Pareto front and is pruned. No trial is pruned during learning-rate warm-up, when its quality is
still poor, nor close to its end, where little would be saved.

The optimistic point is an estimate. Of the trials that were run to the end regardless of their point, 30 % ended better
than that point. This does little harm to the front, because such trials rarely ended on it. The pruner was evaluated by
replaying whole studies of 40 trials, with seeds that no rule was tuned on. It saves 47 % of the steps on digits (35 to
56 %, three studies) and 46 % on text (38 to 55 %, six studies), and keeps 1.000 and 0.999 of the hypervolume. Studies
that are pruned live sample different trials. In live studies, the pruner saves 44 and 49 % of the steps, and the
hypervolume differs from that of unpruned studies by +0.003 +- 0.007 and -0.015 +- 0.025
(`tests/benchmarks/tuning_search.py`).

Times are noisy: of two identical runs, one is slightly faster, and would be on the front only for that reason. So a
trial counts as faster than a finished trial only if it is faster by more than 10 %. Bytes are exact, except for a few
extra bytes in the first step of a run.

Assumptions: no curve improves much more than the curves of finished trials, and all steps send the same bytes. If steps
differ (methods that warm up, that average periodically, or whose bit widths change), only the cost so far counts.

Optuna's pruners compare trials at the same step. Trials with different batch sizes take different numbers of steps, so
the number of evaluations is reported as the step; it is about equal across the trials of a study.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial, TrialState

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import Job
from shardscope.spec.units import seconds_text
from shardscope.tuning.definition import Definition
from shardscope.tuning.driver import Live, Pruner
from shardscope.tuning.front import QUICKER_BY
from shardscope.tuning.measured import TrialMetrics, evaluated
from shardscope.tuning.objectives import QUALITIES
from shardscope.tuning.pruning.outlook import Improvement, at_least, curve_of, improvement
from shardscope.tuning.records import MEASURED, measured_from

LEAST_FINISHED = 6
CAUTION = 1.5
"""Assumed improvement, as a multiple of the best improver's, in a comparison with a finished trial that is not cheaper.
If the finished trial is cheaper, the multiple is 1, because the running trial would at best end near the front."""
_LATEST = 0.85
"""Fraction of the samples after which a trial is not pruned: finishing it costs little and yields its final values."""
_SAME = 1e-3
"""Bytes or memory count as equal up to this relative difference: the first step's extra bytes are spread over all
steps. Quality has no such tolerance."""


@dataclass(frozen=True)
class Finished:
    """A complete trial with its objective values."""

    number: int
    values: Mapping[str, float]
    measured: TrialMetrics


@dataclass(frozen=True)
class ParetoPruner:
    """The dominance pruner (a `driver.Pruner`).

    Args:
        definition: Definition of the study; all its objectives must be measurable during a run.
        least_finished: Number of finished trials required before a trial is pruned; only trials that were evaluated at
            or before the same fraction of their samples count.
        quicker_by: Fraction of a finished trial's time that a trial must save to count as faster. With a negative
            fraction, a trial also counts as faster if it is slower by less than that fraction.

    Raises:
        SpecError: An objective is user-defined, or a number is out of range.
    """

    definition: Definition
    least_finished: int = LEAST_FINISHED
    quicker_by: float = QUICKER_BY

    def __post_init__(self) -> None:
        if self.definition.own:
            raise SpecError(
                "pruner='dominance' needs objectives that are measured during a run, but "
                f"{self.definition.own[0]!r} is user-defined and known only when a run has ended; use pruner='none'"
            )
        if self.least_finished < 1:
            raise SpecError(f"least_finished={self.least_finished} is too few trials; use at least 1")
        if not -1 < self.quicker_by < 1:
            raise SpecError(
                f"quicker_by={self.quicker_by} is not a valid fraction; use more than -1 and less than 1"
            )

    def reason(self, live: Live, trials: list[FrozenTrial]) -> str | None:
        """Return a sentence on a trial that dominates the running trial's optimistic point; None if there is none."""
        finished = finished_of(trials, self.definition.objectives)
        return self.judge(live.measured, live.job, finished)

    def judge(self, measured: TrialMetrics, job: Job, finished: Sequence[Finished]) -> str | None:
        """Return a sentence on why to prune the trial with these metrics; None to continue.

        Args:
            measured: Metrics of the running trial.
            job: Job of the running trial.
            finished: Finished trials of the study.
        """
        share = measured.curve[-1][0] / job.steps if measured.curve else 0.0
        if not 0 < share <= _LATEST or len(finished) < self.least_finished:
            return None
        if measured.curve[-1][0] <= job.lr_schedule.warmup_steps:
            return None
        point, cautious = (self._point(measured, job, share, finished, caution) for caution in (1.0, CAUTION))
        if point is None or cautious is None:
            return None
        beaten = [
            (other, against)
            for other in finished
            for against in (point if self._is_cheaper(other.values, point) else cautious,)
            if self._beats(other.values, against)
        ]
        if not beaten:
            return None
        winner, against = min(beaten, key=lambda pair: [pair[0].values[n] for n in point if n in QUALITIES])
        return _sentence(winner, against, share)

    def _point(
        self, measured: TrialMetrics, job: Job, share: float, finished: Sequence[Finished], caution: float
    ) -> dict[str, float] | None:
        """Return the optimistic value of each objective; None if one of them cannot be estimated yet."""
        point: dict[str, float] = {}
        for name in self.definition.objectives:
            value = self._best(name, measured, job, share, finished, caution=caution)
            if value is None:
                return None
            point[name] = value
        return point

    def _is_cheaper(self, values: Mapping[str, float], point: Mapping[str, float]) -> bool:
        """Return whether a finished trial is better, beyond noise, in an objective other than quality."""
        return any(values[n] * (1 + abs(self._leeway(n))) < point[n] for n in point if n not in QUALITIES)

    def _beats(self, values: Mapping[str, float], point: Mapping[str, float]) -> bool:
        """Return whether a finished trial dominates the point: as good in every objective and better in one."""
        low = {name: value * (1 - self._leeway(name)) for name, value in values.items()}
        high = {name: value * (1 + abs(self._leeway(name))) for name, value in values.items()}
        return all(low[n] <= point[n] for n in point) and any(high[n] < point[n] for n in point)

    def _leeway(self, name: str) -> float:
        if name in QUALITIES:
            return 0.0
        return self.quicker_by if name == "seconds" else _SAME

    def _best(
        self,
        name: str,
        measured: TrialMetrics,
        job: Job,
        share: float,
        finished: Sequence[Finished],
        *,
        caution: float,
    ) -> float | None:
        """Return the lowest value that an objective may reach; None if it cannot be estimated yet."""
        if name not in QUALITIES:
            return at_least(name, measured, job)
        own = curve_of(measured, name, job.steps)
        if not own or own[-1][0] < share:  # the newest value is NaN
            return None
        best = improvement_of(finished, name, share)
        return best.best_end(own[-1][1], caution=caution) if best.num_trials >= self.least_finished else None


def improvement_of(finished: Sequence[Finished], objective: str, share: float) -> Improvement:
    """Return the largest improvement of any finished trial after a fraction `share` of its samples."""
    curves = [curve_of(each.measured, objective, each.measured.curve[-1][0]) for each in finished]
    return improvement(curves, share)


def finished_of(trials: Sequence[FrozenTrial], objectives: Sequence[str]) -> list[Finished]:
    """Return the complete trials of a study that were evaluated at least once."""
    found = []
    for trial in trials:
        measured = measured_from(trial.user_attrs.get(MEASURED))
        if trial.state == TrialState.COMPLETE and measured is not None and measured.curve:
            values = dict(zip(objectives, trial.values, strict=True))
            found.append(Finished(trial.number, values, measured))
    return found


def _sentence(winner: Finished, point: Mapping[str, float], share: float) -> str:
    figures = ", ".join(_against(name, winner.values[name], value) for name, value in point.items())
    return (
        f"could not beat trial {winner.number}, estimated at {share:.0%} of its samples from the best improvement so "
        f"far: {figures}"
    )


def _against(name: str, winner: float, value: float) -> str:
    told = f"{name} {_text(name, winner)} versus {_text(name, value)}"
    return f"{told}, which is within noise" if winner > value else told


def _text(name: str, value: float) -> str:
    if name == "seconds":
        return seconds_text(value)
    return f"{value:.4g}" if name in QUALITIES else f"{value / 1e6:.4g} MB"


_STARTUP = 4
"""Number of trials that must finish before any trial is pruned."""
_WARM_UP_DIVISOR = 3
"""Trials are first compared after 1/3 of their evaluations, because quality is poor during learning-rate warm-up."""
_PERCENTILE = 25.0
_PATIENCE = 2


def _median(evaluations: int) -> BasePruner:
    return optuna.pruners.MedianPruner(_STARTUP, _warm_up(evaluations))


def _warm_up(evaluations: int) -> int:
    return max(1, evaluations // _WARM_UP_DIVISOR)


def _patient(evaluations: int) -> BasePruner:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # its description says so
        return optuna.pruners.PatientPruner(_median(evaluations), patience=_PATIENCE)


PRUNERS: Mapping[str, tuple[Callable[[int], BasePruner] | None, str]] = {
    "dominance": (None, "stops a trial likely to end dominated by a finished one; default for several objectives"),
    "median": (_median, "stops a trial that is worse than the median at the same point; default for one objective"),
    "percentile": (
        lambda number: optuna.pruners.PercentilePruner(_PERCENTILE, _STARTUP, _warm_up(number)),
        "stops a trial that is not among the best quarter at the same point",
    ),
    "hyperband": (
        lambda number: optuna.pruners.HyperbandPruner(1, number, 3),
        "successive halving in several brackets, some stricter than others",
    ),
    "successive-halving": (
        lambda _: optuna.pruners.SuccessiveHalvingPruner(1, 3),
        "continues the best third at 1, 3, 9 evaluations and stops the others",
    ),
    "patient": (_patient, "as median, once a trial has not improved for two evaluations; experimental in Optuna"),
    "none": (None, "runs every trial to its end"),
}  # fmt: skip
"""Pruners by name: a function from the evaluations per trial to Optuna's pruner (or None), and a description."""


def pruner_of(
    pruner: str | BasePruner | Pruner | None, definition: Definition, *, promotes: bool = False
) -> Pruner | None:
    """Return the pruner to use; None if nothing is to be pruned.

    Args:
        pruner: Name of a pruner, or the pruner itself; None uses the default for the study.
        definition: Definition of the study.
        promotes: Whether the study promotes trials by successive halving; a study with one objective then needs no
            pruner.

    Raises:
        SpecError: The name is unknown, or the pruner does not support these objectives.
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
        return ParetoPruner(definition)
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
    """An Optuna pruner that receives the loss or error of a trial at each evaluation.

    `study.pruner` must be the same object as `pruner`: samplers and trials use that attribute.
    """

    pruner: BasePruner
    name: str
    objective: str
    reported: dict[int, int] = field(default_factory=dict)

    @classmethod
    def judging(cls, pruner: BasePruner, name: str, definition: Definition) -> ByOptuna | None:
        """Return the pruner for a study with a single objective; None for Optuna's `NopPruner`.

        Raises:
            SpecError: There are several objectives, or the only one is neither loss nor error.
        """
        if isinstance(pruner, optuna.pruners.NopPruner):
            return None
        if len(definition.objectives) > 1:
            raise SpecError(
                f"pruner={name} needs one objective, got {', '.join(definition.objectives)}; use 'dominance', or one "
                "objective"
            )
        if definition.objectives[0] not in QUALITIES:
            raise SpecError(
                f"pruner={name} compares loss or error during a run, but the objective {definition.objectives[0]!r} is "
                "neither; use pruner='none'"
            )
        return cls(pruner, name, definition.objectives[0])

    @property
    def _column(self) -> int:
        return 1 + QUALITIES.index(self.objective)

    def report(self, live: Live) -> None:
        """Report new evaluations to the study."""
        curve = live.measured.curve
        for index in range(self.reported.get(live.number, 0), len(curve)):
            live.trial.report(curve[index][self._column], index + 1)
            self.reported[live.number] = index + 1

    def reason(self, live: Live, _: list[FrozenTrial]) -> str | None:
        """Return a sentence on why Optuna prunes the trial; None if it does not."""
        self.report(live)
        curve = live.measured.curve
        if not curve or curve[-1][0] >= live.job.steps or not live.trial.should_prune():
            return None
        return (
            f"the pruner {self.name} stopped it at {curve[-1][0] / live.job.steps:.0%} of its samples: "
            f"{self.objective} {curve[-1][self._column]:.4g} does not meet its criterion at that point"
        )
