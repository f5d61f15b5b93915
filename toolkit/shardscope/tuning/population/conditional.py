"""A study's `Space`, with its branches, as a space that a population can move in.

A setting that belongs to a branch is there only while the branch is chosen: a clone that changes the branch draws the
new branch's settings, and what it keeps moves as in `Ranges`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardscope.spec import Job
from shardscope.spec.space import Between, Choices, PowersOfTwo, Space
from shardscope.tuning.apply import apply, branches_of
from shardscope.tuning.population.explore import Axis, Choice, Number, PowerOfTwo, Ranges, Whole
from shardscope.tuning.population.settings import Settings


class Conditional(Ranges):
    """Draws and moves within a `Space`; settings are by the names of its parameters.

    Example:
        >>> space = Space({"optimizer": ["adamw", "lars"], "optimizer[lars].momentum": (0.5, 0.95)})
        >>> Conditional(space).draw(Job(model="mlp", data="digits"), Random(3))
        {'optimizer': 'adamw'}
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.axes = {name: _axis(parameter) for name, parameter in space.parameters.items()}

    def _choose(self, job: Job, value_of: Callable[[str], Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for name in self.space.active(chosen, branches_of(job)):
            chosen[name] = value_of(name)
        return chosen

    def apply(self, job: Job, settings: Settings) -> Job:
        """`job` with these settings, over as many steps."""
        return apply(job, settings, equal="steps")

    def describe(self) -> dict[str, Any]:
        """By parameter, as JSON."""
        described: dict[str, Any] = json.loads(self.space.to_json())["parameters"]
        return described


def _axis(parameter: Choices | Between | PowersOfTwo) -> Axis:
    if isinstance(parameter, Choices):
        return Choice(parameter.values)
    if isinstance(parameter, PowersOfTwo):
        return PowerOfTwo(parameter.low, parameter.high)
    if parameter.is_whole:
        return Whole(int(parameter.low), int(parameter.high))
    return Number(float(parameter.low), float(parameter.high), parameter.log)
