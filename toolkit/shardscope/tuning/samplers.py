"""Samplers that choose a trial's settings: Optuna's, by short names, and `ByCost`.

Each sampler is configured to handle branches in the space and impossible trials. `ByCost` uses TPE while trials are
cheap and a Gaussian process when they are expensive. The Gaussian process needs fewer trials, but several seconds of
CPU time per trial, which pays off if a trial takes about half a minute or more. The sampler is chosen anew for every
trial, from the finished trials in the storage. So a study that resumes after a restart, or on another machine, chooses
as if it had never stopped.

Queued settings are used unchanged; the trial records which sampler chose its remaining settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any, Self

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import threadpool_limits

from shardscope.errors import SpecError, StudyError, unknown_name
from shardscope.spec.space import Between, Choices, PowersOfTwo, Space, Value
from shardscope.tuning.apply import branches_of
from shardscope.tuning.definition import Definition
from shardscope.tuning.records import (
    IMPOSSIBLE,
    MEASURED,
    PAUSED,
    SAMPLER,
    measured_from,
    not_counted,
    study_name,
)

EXPENSIVE_TRIAL_S = 30.0
"""Trial duration, in seconds, from which it pays to spend several seconds of CPU time on choosing settings."""
_STARTUP = 10
"""Number of complete trials that a Gaussian process needs before it starts; Optuna's default."""


class GaussianProcess(GPSampler):
    """Optuna's Gaussian process on one thread, so that it takes no cores from the ranks that are training.

    Optuna limits torch to one thread. It also limits BLAS, but through an environment variable that BLAS reads only
    when it is loaded, which is too late here. This class therefore sets the limit of BLAS itself.
    """

    @classmethod
    def seeded(cls, seed: int) -> Self:
        """Return the sampler. It leaves settings within branches to TPE, as a Gaussian process cannot sample them."""
        return cls(
            seed=seed, n_startup_trials=_STARTUP, warn_independent_sampling=False,
            independent_sampler=TPESampler(seed=seed, multivariate=False),
        )  # fmt: skip

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Sample the settings that all trials have, jointly and on one BLAS thread."""
        with threadpool_limits(limits=1, user_api="blas"):
            return super().sample_relative(study, trial, search_space)


class ByCost(BaseSampler):
    """Sampler that delegates each trial to one of two samplers, depending on how long trials take.

    Args:
        cheap: Sampler for cheap trials. It is also used until `_STARTUP` trials are complete, and after an impossible
            trial: a Gaussian process ignores impossible trials and would propose the same settings again.
        expensive: Sampler for expensive trials.
        expensive_s: Trials count as expensive if the median time of the finished trials is at least this many seconds.
    """

    def __init__(
        self, cheap: BaseSampler, expensive: BaseSampler, expensive_s: float = EXPENSIVE_TRIAL_S
    ) -> None:
        self.cheap, self.expensive, self.expensive_s = cheap, expensive, expensive_s
        self._used: dict[int, BaseSampler] = {}

    def used_for(self, number: int) -> BaseSampler:
        """Return the sampler that this process used for a trial."""
        return self._used.get(number, self.cheap)

    def choose(self, trials: Sequence[FrozenTrial]) -> BaseSampler:
        """Return the sampler for the next trial of a study."""
        complete = sum(trial.state == TrialState.COMPLETE for trial in trials)
        ended = [trial for trial in trials if trial.state.is_finished()]
        seconds = median_seconds(trials)
        if complete < _STARTUP or seconds is None or not_counted(ended[-1]) == IMPOSSIBLE:
            return self.cheap
        return self.expensive if seconds >= self.expensive_s else self.cheap

    # Optuna's interface.

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Call `before_trial` of both samplers."""
        self.cheap.before_trial(study, trial)
        self.expensive.before_trial(study, trial)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Choose the sampler; Optuna calls this first for every trial."""
        used = self._used[trial.number] = self.choose(study.get_trials(deepcopy=False))
        return used.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Sample with the chosen sampler."""
        return self.used_for(trial.number).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Sample with the chosen sampler."""
        return self.used_for(trial.number).sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Reseed both samplers."""
        self.cheap.reseed_rng()
        self.expensive.reseed_rng()


def median_seconds(trials: Sequence[FrozenTrial]) -> float | None:
    """Return the median time of the finished trials, including pruned ones, in seconds; None until one has ended."""
    seconds = [
        cost
        for trial in trials
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
        and not_counted(trial) is None
        and (cost := _seconds(trial)) is not None
    ]
    return median(seconds) if seconds else None


def _seconds(trial: FrozenTrial) -> float | None:
    """Return the time of a trial from start to end, in seconds; if it paused at rungs, the time of its steps only."""
    attrs: Mapping[str, Any] = trial.user_attrs
    if PAUSED not in attrs:
        return None if trial.duration is None else trial.duration.total_seconds()
    measured = measured_from(attrs.get(MEASURED))
    return None if measured is None or measured.step_s is None else measured.step_s * measured.steps


def _by_cost(expensive_s: float) -> Callable[[int], BaseSampler]:
    return lambda seed: ByCost(TPESampler(seed=seed), GaussianProcess.seeded(seed), expensive_s)


def _qmc(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # its description says so
        return optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)


def _cma_es(seed: int) -> BaseSampler:
    if find_spec("cmaes") is None:
        raise SpecError("sampler='cma-es' needs the package cmaes; run pip install cmaes, or use 'tpe'")
    return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)


SAMPLERS: Mapping[str, tuple[Callable[[int], BaseSampler], str]] = {
    "auto": (
        _by_cost(EXPENSIVE_TRIAL_S),
        "tpe, then gp once a trial takes half a minute or more; the default",
    ),
    "tpe": (lambda seed: TPESampler(seed=seed), "tree of Parzen estimators"),
    "gp": (
        _by_cost(0),
        "Gaussian process; needs fewer trials, but seconds of CPU time for each: for trials of half a minute or more",
    ),
    "qmc": (_qmc, "a scrambled Sobol sequence, evenly spread; experimental in Optuna"),
    "nsga": (
        lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=16),
        "NSGA-II; for hundreds of trials",
    ),
    "cma-es": (
        _cma_es,
        "covariance matrix adaptation evolution strategy; one objective, numeric parameters only",
    ),
    "random": (lambda seed: optuna.samplers.RandomSampler(seed=seed), "random search, as a baseline"),
}
"""Samplers by name: a function from a seed to the sampler, and a description."""
_SHORT = {
    "TPESampler": "tpe", "GPSampler": "gp", "QMCSampler": "qmc", "NSGAIISampler": "nsga", "CmaEsSampler": "cma-es",
    "RandomSampler": "random",
}  # fmt: skip
"""Short names of Optuna's sampler classes."""


def sampler_of(sampler: str | BaseSampler, *, seed: int, num_objectives: int) -> BaseSampler:
    """Return the Optuna sampler for a short name, or a given sampler unchanged.

    Args:
        sampler: Name of a sampler, or the sampler itself, which is returned unchanged.
        seed: Seed of a sampler given by name.
        num_objectives: Number of objectives of the study.

    Raises:
        SpecError: The name is unknown, or the sampler does not support several objectives.
    """
    if isinstance(sampler, BaseSampler):
        return sampler
    if sampler not in SAMPLERS:
        raise unknown_name("sampler", sampler, SAMPLERS)
    if sampler == "cma-es" and num_objectives > 1:
        raise SpecError(
            f"sampler='cma-es' minimises only one objective, got {num_objectives}; give one, or use 'tpe'"
        )
    return SAMPLERS[sampler][0](seed)


def drawn_by(sampler: BaseSampler, number: int) -> str:
    """Return the short name of the sampler that sampled a trial; for the user's own sampler, its class name."""
    used = sampler.used_for(number) if isinstance(sampler, ByCost) else sampler
    names = [_SHORT[cls.__name__] for cls in type(used).__mro__ if cls.__name__ in _SHORT]
    return names[0] if names else type(used).__name__


def check_storage(sampler: str | BaseSampler, storage: str | BaseStorage | None) -> None:
    """Reject a sampler that would run code from a storage that others can write to.

    Optuna's CMA-ES keeps its state in the trials as a pickle, and unpickling can run arbitrary code. Only memory and
    the study's own journal, which only the user can write to, are safe as storage.

    Raises:
        SpecError: The sampler is CMA-ES and the storage is not safe.
    """
    is_cma_es = sampler == "cma-es" or isinstance(sampler, optuna.samplers.CmaEsSampler)
    if is_cma_es and not (storage is None or isinstance(storage, InMemoryStorage)):
        raise SpecError(
            "sampler='cma-es' unpickles data from this storage, so anybody who can write to it could run code here; "
            "leave storage out, which keeps the study in a private journal, or use 'tpe'"
        )


POSSIBLE = "possible"
"""Name of the constraint that every trial sets, so that samplers learn which settings are impossible."""


def suggest(trial: optuna.Trial, definition: Definition) -> dict[str, Value]:
    """Return the settings of a trial; settings that are already in the storage are not sampled again.

    Raises:
        SpecError: The trial was queued with a value outside the space. Or the sampler drew an optimizer reserved for
            baselines, because another driver took the trial for which the optimizer was fixed.
        StudyError: The study contains a trial from another program whose parameters have a different type.
    """
    space = definition.space
    chosen: dict[str, Value] = {}
    queued = _queued(trial)
    _check_queued(queued, space)
    for name in space.active(chosen, branches_of(definition.job)):
        parameter, held = space.parameters[name], study_name(name, space)
        try:
            chosen[name] = _suggested(trial, held, parameter)
        except ValueError as error:  # Optuna: the distribution is incompatible with an earlier one
            raise StudyError(
                f"study {trial.study.study_name!r} contains a trial from another program, whose {held!r} has a "
                f"different type ({error}); give your study another name"
            ) from error
    if "optimizer" not in queued and definition.is_baseline(chosen):
        raise SpecError(f"only baselines of this study have the optimizer {chosen['optimizer']!r}")
    if SAMPLER not in trial.user_attrs and not set(trial.params) <= set(queued):
        trial.set_user_attr(SAMPLER, drawn_by(trial.study.sampler, trial.number))
    return chosen


def constrain(trial: optuna.Trial, value: float) -> None:
    """Set the constraint of a trial (0 possible, 1 impossible), unless it is already stored."""
    if POSSIBLE not in trial.constraints:
        trial.set_constraint(POSSIBLE, value)


def _suggested(trial: optuna.Trial, held: str, parameter: Choices | Between | PowersOfTwo) -> Value:
    if isinstance(parameter, Choices):
        return trial.suggest_categorical(held, parameter.values)
    if isinstance(parameter, PowersOfTwo):
        return int(2 ** trial.suggest_int(held, *parameter.exponents))
    if parameter.is_whole:
        return trial.suggest_int(held, int(parameter.low), int(parameter.high), log=parameter.log)
    return trial.suggest_float(held, float(parameter.low), float(parameter.high), log=parameter.log)


def _queued(trial: optuna.Trial) -> Mapping[str, Any]:
    """Return the settings with which the trial was queued."""
    attrs = trial.study.get_trials(deepcopy=False)[trial.number].system_attrs
    fixed: Mapping[str, Any] = attrs.get("fixed_params", {})
    return fixed


def _check_queued(queued: Mapping[str, Any], space: Space) -> None:
    known = {study_name(name, space): parameter for name, parameter in space.parameters.items()}
    for held, value in queued.items():
        if held not in known or not _holds(known[held], value):
            raise SpecError(f"the trial was queued with {held}={value!r}, which is outside the space")


def _holds(parameter: Choices | Between | PowersOfTwo, value: Any) -> bool:
    """Return whether a value, as stored in the study, is in a parameter's range."""
    if isinstance(parameter, Choices):
        return value in parameter.values
    low, high = parameter.exponents if isinstance(parameter, PowersOfTwo) else (parameter.low, parameter.high)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    needs_whole = isinstance(parameter, PowersOfTwo) or parameter.is_whole
    return is_number and low <= value <= high and not (needs_whole and value % 1)
