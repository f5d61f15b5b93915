"""A sampler that goes by what trials cost: TPE while they are cheap, a Gaussian process once they are dear.

A Gaussian process needs fewer trials and takes seconds of CPU for each; half a minute of training is where that begins
to pay. Whoever draws decides anew for every trial, from what the study's storage says of the finished ones. So a study
that goes on after a restart, or on another machine, decides as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Self

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import threadpool_limits

from shardscope.tuning.records import IMPOSSIBLE, MEASURED, PAUSED, measured_from, not_counted

DEAR_S = 30.0
"""Seconds of a trial from which on a better draw is worth seconds of CPU."""
_STARTUP = 10
"""Complete trials below which a Gaussian process knows nothing: Optuna's own default."""


class GaussianProcess(GPSampler):
    """Optuna's, on one thread, so that it takes no core from the ranks that train beside it.

    Optuna holds torch to one thread, and BLAS by a variable that is read before BLAS is loaded, hence too late.
    """

    @classmethod
    def seeded(cls, seed: int) -> Self:
        """With settings of branches, which a Gaussian process cannot take in, drawn by TPE."""
        return cls(
            seed=seed, n_startup_trials=_STARTUP, warn_independent_sampling=False,
            independent_sampler=TPESampler(seed=seed, multivariate=False),
        )  # fmt: skip

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The settings that every trial has, drawn together."""
        with threadpool_limits(limits=1, user_api="blas"):
            return super().sample_relative(study, trial, search_space)


class ByCost(BaseSampler):
    """Draws a trial by one sampler or by the other.

    Args:
        cheap: For cheap trials; it also draws whenever nothing is known yet, and after a trial that was impossible,
            of which a Gaussian process takes no notice: it would ask for the same again.
        dear: For trials of `dear_s` and more.
        dear_s: Median seconds of the finished trials.
    """

    def __init__(self, cheap: BaseSampler, dear: BaseSampler, dear_s: float = DEAR_S) -> None:
        self.cheap, self.dear, self.dear_s = cheap, dear, dear_s
        self._used: dict[int, BaseSampler] = {}

    def used_for(self, number: int) -> BaseSampler:
        """The sampler that drew a trial of this process."""
        return self._used.get(number, self.cheap)

    def choose(self, trials: Sequence[FrozenTrial]) -> BaseSampler:
        """The sampler for the next of a study's trials."""
        complete = sum(trial.state == TrialState.COMPLETE for trial in trials)
        ended = [trial for trial in trials if trial.state.is_finished()]
        seconds = median_seconds(trials)
        if complete < _STARTUP or seconds is None or not_counted(ended[-1]) == IMPOSSIBLE:
            return self.cheap
        return self.dear if seconds >= self.dear_s else self.cheap

    # What Optuna calls.

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Both may have something to do."""
        self.cheap.before_trial(study, trial)
        self.dear.before_trial(study, trial)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Called first for every trial that is drawn."""
        used = self._used[trial.number] = self.choose(study.get_trials(deepcopy=False))
        return used.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """By the one that was chosen."""
        return self.used_for(trial.number).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """By the one that was chosen."""
        return self.used_for(trial.number).sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Both."""
        self.cheap.reseed_rng()
        self.dear.reseed_rng()


def median_seconds(trials: Sequence[FrozenTrial]) -> float | None:
    """What a trial took, in the middle, pruned ones among them; None before one has ended."""
    seconds = [
        cost
        for trial in trials
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
        and not_counted(trial) is None
        and (cost := _seconds(trial)) is not None
    ]
    return median(seconds) if seconds else None


def _seconds(trial: FrozenTrial) -> float | None:
    """From its beginning to its end; of one that paused between, its steps."""
    attrs: Mapping[str, Any] = trial.user_attrs
    if PAUSED not in attrs:
        return None if trial.duration is None else trial.duration.total_seconds()
    measured = measured_from(attrs.get(MEASURED))
    return None if measured is None or measured.step_s is None else measured.step_s * measured.steps
