"""The samplers of Optuna by short names, each set up for a space of branches and trials that are impossible."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, InMemoryStorage

from shardscope.errors import SpecError, unknown_name
from shardscope.tuning.by_cost import ByCost, GaussianProcess


def _tpe(seed: int) -> BaseSampler:
    return optuna.samplers.TPESampler(seed=seed)


def _auto(seed: int) -> BaseSampler:
    return ByCost(_tpe(seed), GaussianProcess.seeded(seed))


def _gp(seed: int) -> BaseSampler:
    return ByCost(_tpe(seed), GaussianProcess.seeded(seed), dear_s=0)


def _nsga(seed: int) -> BaseSampler:
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=16)


def _random(seed: int) -> BaseSampler:
    return optuna.samplers.RandomSampler(seed=seed)


def _qmc(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # said in `SAMPLERS`
        return optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)


def _cma_es(seed: int) -> BaseSampler:
    if find_spec("cmaes") is None:
        raise SpecError("sampler='cma-es' needs the package cmaes; install shardscope[cmaes], or use 'tpe'")
    return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)


SAMPLERS: Mapping[str, tuple[Callable[[int], BaseSampler], str]] = {
    "auto": (_auto, "tpe, and gp as soon as a trial takes half a minute and more; the default"),
    "tpe": (_tpe, "tree of Parzen estimators"),
    "gp": (
        _gp,
        "Gaussian process; needs fewer trials, seconds of CPU each: for trials of half a minute and more",
    ),
    "qmc": (_qmc, "a scrambled Sobol sequence, evenly spread; experimental in Optuna"),
    "nsga": (_nsga, "NSGA-II; for hundreds of trials"),
    "cma-es": (_cma_es, "evolution of a covariance matrix; one objective, numbers only"),
    "random": (_random, "the yardstick"),
}
"""By name: how to make it, and when to use it."""
_SHORT = {
    "TPESampler": "tpe", "GPSampler": "gp", "QMCSampler": "qmc", "NSGAIISampler": "nsga", "CmaEsSampler": "cma-es",
    "RandomSampler": "random",
}  # fmt: skip
"""Names of Optuna's classes here."""


def sampler_of(sampler: str | BaseSampler, *, seed: int, num_objectives: int) -> BaseSampler:
    """The sampler of this name, or the one given.

    Raises:
        SpecError: There is none of this name, or it cannot do several objectives.
    """
    if isinstance(sampler, BaseSampler):
        return sampler
    if sampler not in SAMPLERS:
        raise unknown_name("sampler", sampler, SAMPLERS)
    if sampler == "cma-es" and num_objectives > 1:
        raise SpecError(
            f"sampler='cma-es' minimises one objective, got {num_objectives}; give one, or use 'tpe'"
        )
    return SAMPLERS[sampler][0](seed)


def drawn_by(sampler: BaseSampler, number: int) -> str:
    """Which sampler drew the trial of this number, by its short name; one of the user's own by its class's."""
    used = sampler.used_for(number) if isinstance(sampler, ByCost) else sampler
    names = [_SHORT[cls.__name__] for cls in type(used).__mro__ if cls.__name__ in _SHORT]
    return names[0] if names else type(used).__name__


def check_storage(sampler: str | BaseSampler, storage: str | BaseStorage | None) -> None:
    """Refuse a sampler that would run code from a storage that others can write to.

    Optuna's CMA-ES keeps its state in the trials as a pickle, and loading one runs whatever is in it. In the study's
    own journal, which is the user's alone, and in memory it is the user's own.

    Raises:
        SpecError: It is CMA-ES, and the storage another.
    """
    is_cma_es = sampler == "cma-es" or isinstance(sampler, optuna.samplers.CmaEsSampler)
    if is_cma_es and not (storage is None or isinstance(storage, InMemoryStorage)):
        raise SpecError(
            "sampler='cma-es' would unpickle what others may have written to this storage, and so run it; leave "
            "storage out, which keeps the study in a journal of your own, or use 'tpe'"
        )
