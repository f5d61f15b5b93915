"""A study's `Space`, with its branches, as a space that a population can move in.

A setting that belongs to a branch is there only while the branch is chosen: a clone that changes the branch draws the
new branch's settings, and what it keeps moves as in `Ranges`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from shardscope.errors import SpecError
from shardscope.spec import Job
from shardscope.spec.space import Between, Choices, PowersOfTwo, Space
from shardscope.tuning.apply import apply, branches_of
from shardscope.tuning.population.explore import ATTEMPTS, Axis, Choice, Number, PowerOfTwo, Whole
from shardscope.tuning.population.settings import Settings


class Conditional:
    """Draws and moves within a `Space`; settings are by the names of its parameters.

    Example:
        >>> space = Space({"optimizer": ["adamw", "lars"], "optimizer[lars].momentum": (0.5, 0.95)})
        >>> Conditional(space).draw(Job(model="mlp", data="digits"), Random(3))
        {'optimizer': 'adamw'}
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.axes = {name: _axis(parameter) for name, parameter in space.parameters.items()}

    def draw(self, job: Job, random: Random) -> dict[str, Any]:
        """Settings that `job` can have.

        Raises:
            SpecError: None of many draws makes a job; says why the last did not.
        """
        for attempt in range(ATTEMPTS):
            settings = self._choose(job, lambda name: self.axes[name].draw(random))
            try:
                self.apply(job, settings)
            except SpecError as error:
                if attempt == ATTEMPTS - 1:
                    raise SpecError(f"the space holds next to no job that can exist: {error}") from None
            else:
                break
        return settings

    def explore(self, job: Job, settings: Settings, random: Random, *, resample: float) -> dict[str, Any]:
        """Settings near those given; the same, if no job comes of many tries."""

        def move(name: str) -> Any:
            is_new = name not in settings or random.random() < resample
            return self.axes[name].draw(random) if is_new else self.axes[name].step(settings[name], random)

        for _ in range(ATTEMPTS):
            moved = self._choose(job, move)
            try:
                before, after = self.apply(job, settings), self.apply(job, moved)
                after.compression.check_follows(before.compression.name)
            except SpecError:
                continue
            return moved
        return dict(settings)

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
