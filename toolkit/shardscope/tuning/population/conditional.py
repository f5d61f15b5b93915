"""A study's `Space`, with its branches, adapted so that a population can explore it.

A setting that belongs to a branch exists only while that branch is chosen. A clone that changes the branch samples the
new branch's settings; its other settings are perturbed or resampled as in `Ranges`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardscope.errors import SpecError
from shardscope.spec import Job
from shardscope.spec.space import Between, Choices, PowersOfTwo, Space, parse_name
from shardscope.tuning.apply import apply, branches_of, check
from shardscope.tuning.population.explore import Axis, Choice, Number, PowerOfTwo, Ranges, Whole
from shardscope.tuning.population.settings import MAY_CHANGE, Settings

_FIELDS = {"warmup": "lr_schedule", "lr_rule": "optimizer"}
"""Field of the job that a setting changes, by the setting's name, where the two names differ."""


class Conditional(Ranges):
    """Explorable space that samples and perturbs settings within a `Space`, keyed by the names of its parameters.

    Args:
        space: Search space, as for a study.
        job: Job that the settings belong to.

    Raises:
        SpecError: A setting cannot change during training, or has a value that makes every job invalid.

    Example:
        >>> from random import Random
        >>> space = Space({"optimizer": ["adamw", "lars"], "optimizer[lars].momentum": (0.5, 0.95)})
        >>> job = Job(model="mlp", data="digits")
        >>> Conditional(space, job).draw(job, Random(3))
        {'optimizer': 'adamw'}
    """

    def __init__(self, space: Space, job: Job) -> None:
        for name in space.parameters:
            _check_may_change(name)
        check(job, space, equal="steps")
        self.space = space
        self.axes = {name: _axis(parameter) for name, parameter in space.parameters.items()}

    def _choose(self, job: Job, value_of: Callable[[str], Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for name in self.space.active(chosen, branches_of(job)):
            chosen[name] = value_of(name)
        return chosen

    def apply(self, job: Job, settings: Settings) -> Job:
        """Return `job` with these settings and the same number of steps."""
        return apply(job, settings, equal="steps")

    def describe(self) -> dict[str, Any]:
        """Return the parameters of the space by name, as JSON."""
        described: dict[str, Any] = json.loads(self.space.to_json())["parameters"]
        return described


def _check_may_change(name: str) -> None:
    owner = parse_name(name).owner
    if _FIELDS.get(owner, owner) not in MAY_CHANGE:
        raise SpecError(
            f"space[{name!r}] cannot change while a member trains: checkpoints would not fit; search it with "
            "ss.tune, or set it in the job"
        )


def _axis(parameter: Choices | Between | PowersOfTwo) -> Axis:
    if isinstance(parameter, Choices):
        return Choice(parameter.values)
    if isinstance(parameter, PowersOfTwo):
        return PowerOfTwo(parameter.low, parameter.high)
    if parameter.is_whole:
        return Whole(int(parameter.low), int(parameter.high))
    return Number(float(parameter.low), float(parameter.high), parameter.log)
