"""Dominance pruning: a trial stops once some finished trial beats the best that it can still come to.

Of several objectives only quality needs the whole run: time, bytes and memory of all steps are known after a few. So
at every evaluation a trial gets an optimistic point. Its quality is what it would come to if it improved as much as
the best improver among the study's finished trials did from the same share of its samples (`curves`). Its time and
bytes are those of all its steps at the present pace. Where a finished trial is at least as good as that point in
everything and better in something, the rest of the run cannot bring it onto the front.

Times are noisy: of two runs alike one is the quicker, and would be on the front for that alone. So a trial counts as
quicker than a finished one only if it is so by more than a tenth. Bytes are exact but for a few that only the first
step of a run sends.

What it rests on: that no curve improves more than every finished one did, and that all steps send alike. Where they do
not (methods that warm up, that average now and then, or whose bits move), only what has been spent already counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from shardscope.errors import SpecError
from shardscope.spec import Compression, Job
from shardscope.spec.units import seconds_text
from shardscope.tuning.definition import QUALITIES, Definition
from shardscope.tuning.driver import Live
from shardscope.tuning.measured import Measured
from shardscope.tuning.pruning.curves import Improvement, curve_of, improvement
from shardscope.tuning.records import MEASURED, measured_from

LEAST_FINISHED = 4
QUICKER_BY = 0.1
"""A median step of a run differed by 3 to 10 % from that of a run alike, one after the other on a busy machine."""
_SAME = 1e-3
"""Relative difference up to which bytes are the same, and memory: of those in a run's first step a share is counted to
every step. Of quality there is none."""


@dataclass(frozen=True)
class Finished:
    """A trial that has its values."""

    number: int
    values: Mapping[str, float]
    measured: Measured


@dataclass(frozen=True)
class Dominance:
    """The pruner (a `driver.Pruner`).

    Args:
        definition: Of the study; its objectives must all be measured while a run goes on.
        least_finished: Trials that must have finished, with evaluations by the same share, before any is pruned.
        quicker_by: Share of a finished trial's time that a trial must save to count as quicker at all. Negative gives
            it the benefit of the doubt: it counts as quicker while it is slower by less.

    Raises:
        SpecError: An objective is a function of the user's, or a number is out of its range.
    """

    definition: Definition
    least_finished: int = LEAST_FINISHED
    quicker_by: float = QUICKER_BY

    def __post_init__(self) -> None:
        if self.definition.own:
            raise SpecError(
                "pruner='dominance' needs objectives that are measured as a run goes on, and "
                f"{self.definition.own[0]!r} is a function of yours, known when it has ended; use pruner='none'"
            )
        if self.least_finished < 1:
            raise SpecError(f"least_finished={self.least_finished} is no number of trials; use at least 1")
        if not -1 < self.quicker_by < 1:
            raise SpecError(f"quicker_by={self.quicker_by} is no share of a time; use -1 to 1, both left out")

    def reason(self, live: Live, trials: list[FrozenTrial]) -> str | None:
        """By which trial the running one is beaten whatever it still does, and in what figures; None if by none."""
        finished = finished_of(trials, self.definition.objectives)
        return self.judge(live.measured, live.job, finished)

    def judge(self, measured: Measured, job: Job, finished: Sequence[Finished]) -> str | None:
        """The same from figures alone."""
        share = measured.curve[-1][0] / job.steps if measured.curve else 0.0
        if not 0 < share < 1 or len(finished) < self.least_finished:
            return None
        point: dict[str, float] = {}
        for name in self.definition.objectives:
            value = self._best(name, measured, job, share, finished)
            if value is None:
                return None
            point[name] = value
        winners = [other for other in finished if self._beats(other.values, point)]
        if not winners:
            return None
        winner = min(winners, key=lambda other: [other.values[n] for n in point if n in QUALITIES])
        return _sentence(winner, point, share)

    def _beats(self, values: Mapping[str, float], point: Mapping[str, float]) -> bool:
        """Whether a finished trial is at least as good in everything and better in something."""
        low = {name: value * (1 - self._leeway(name)) for name, value in values.items()}
        high = {name: value * (1 + abs(self._leeway(name))) for name, value in values.items()}
        return all(low[n] <= point[n] for n in point) and any(high[n] < point[n] for n in point)

    def _leeway(self, name: str) -> float:
        if name in QUALITIES:
            return 0.0
        return self.quicker_by if name == "seconds" else _SAME

    def _best(
        self, name: str, measured: Measured, job: Job, share: float, finished: Sequence[Finished]
    ) -> float | None:
        """The least that an objective may come to; None where nothing can be said yet."""
        if name not in QUALITIES:
            steps = job.steps if is_steady(job.compression) else min(measured.steps, job.steps)
            return measured.objective(name, steps)
        own = curve_of(measured, name, job.steps)
        if not own or own[-1][0] < share:  # the newest value is no number
            return None
        best = improvement_of(finished, name, share)
        return best.best_end(own[-1][1]) if best.num_trials >= self.least_finished else None


def improvement_of(finished: Sequence[Finished], objective: str, share: float) -> Improvement:
    """What the best improver of some finished trials gained after a share of its samples."""
    curves = [curve_of(each.measured, objective, each.measured.curve[-1][0]) for each in finished]
    return improvement(curves, share)


def finished_of(trials: Sequence[FrozenTrial], objectives: Sequence[str]) -> list[Finished]:
    """The complete trials of a study that have a curve."""
    found = []
    for trial in trials:
        measured = measured_from(trial.user_attrs.get(MEASURED))
        if trial.state == TrialState.COMPLETE and measured is not None and measured.curve:
            values = dict(zip(objectives, trial.values, strict=True))
            found.append(Finished(trial.number, values, measured))
    return found


def is_steady(compression: Compression) -> bool:
    """Whether every step sends alike and takes alike, so that some steps tell of all.

    Example:
        >>> is_steady(Compression("topk")), is_steady(Compression("onebit-adam"))
        (True, False)
    """
    return compression.kind != "steps" and "update_every" not in compression.settings


def _sentence(winner: Finished, point: Mapping[str, float], share: float) -> str:
    figures = ", ".join(
        f"{name} {_text(name, winner.values[name])} against {_text(name, value)}"
        for name, value in point.items()
    )
    return (
        f"trial {winner.number} beats the best that this one can still come to, judged at {share:.0%} of its samples: "
        f"{figures}"
    )


def _text(name: str, value: float) -> str:
    if name == "seconds":
        return seconds_text(value)
    return f"{value:.4g}" if name in QUALITIES else f"{value / 1e6:.4g} MB"
