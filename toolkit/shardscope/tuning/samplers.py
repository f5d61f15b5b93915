"""The samplers of Optuna by short names, each set up for a space of branches and trials that are impossible."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import optuna
from optuna.samplers import BaseSampler

from shardscope.errors import SpecError, unknown_name


def _tpe(seed: int) -> BaseSampler:
    return optuna.samplers.TPESampler(seed=seed)


def _gp(seed: int) -> BaseSampler:
    return optuna.samplers.GPSampler(seed=seed)


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
    "tpe": (_tpe, "tree of Parzen estimators; the default"),
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
