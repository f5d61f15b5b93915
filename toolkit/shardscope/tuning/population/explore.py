"""Explore: the space of a population, and how settings are resampled and perturbed between intervals.

| range or choices of a setting | resample draws a new value | perturb changes the current value |
|---|---|---|
| ``(0.0, 0.1)`` | uniform | 20 % up or down, within the bounds |
| ``(1e-4, 1e-1, "log")`` | uniform in the logarithm | times 1.2 or 0.8, within the bounds |
| ``(0, 20)``, integers | uniform | 20 % (at least 1) up or down, within the bounds |
| ``(16, 256, "log2")`` | uniform over powers of two | doubled or halved, within the bounds |
| ``["none", "topk", ...]`` | uniform | no change: choices have no order, so they are only resampled |

Each setting of a clone is either resampled, with some probability, or perturbed. A category is never treated as a
number, and the perturbation of an integer is never rounded to zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from shardscope.errors import SpecError
from shardscope.spec import Job
from shardscope.tuning.apply import checked_rows
from shardscope.tuning.population.settings import Settings, as_json, check_path, with_settings

STEP = 0.2
"""Size of a perturbation, as a fraction of the value (Jaderberg et al. 2017, appendix A: factors of 0.8 and 1.2)."""
LEAST_STEP = 0.05
"""In a linear range, a perturbation is `STEP` times the value or times this fraction of the range, whichever is larger,
so that a value of zero can change."""
ATTEMPTS = 50
"""Number of attempts before a space counts as having no valid job, or a member keeps its settings."""


class Explorable(Protocol):
    """A space that a population can explore. All draws use the generator that is passed in."""

    def draw(self, job: Job, random: Random) -> Settings:
        """Return initial settings of a member, valid for `job`."""
        ...

    def explore(self, job: Job, settings: Settings, random: Random, *, resample: float) -> Settings:
        """Perturb the given settings, or resample each with probability `resample`; the result is valid for `job`."""
        ...

    def apply(self, job: Job, settings: Settings) -> Job:
        """Return `job` with these settings.

        Raises:
            SpecError: The settings are invalid for the job.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return the space as JSON; a population can be resumed only with the same JSON."""
        ...


class Axis(ABC):
    """One setting: how its values are sampled, and how a value is perturbed."""

    @abstractmethod
    def draw(self, random: Random) -> Any:
        """Return a random value."""

    @abstractmethod
    def step(self, value: Any, random: Random) -> Any:
        """Return a perturbed copy of `value`."""


@dataclass(frozen=True)
class Number(Axis):
    """A real number between bounds."""

    low: float
    high: float
    is_log: bool = False

    def draw(self, random: Random) -> float:
        if self.is_log:
            return self._within(math.exp(random.uniform(math.log(self.low), math.log(self.high))))
        return random.uniform(self.low, self.high)

    def step(self, value: Any, random: Random) -> float:
        share = random.choice((-STEP, STEP))
        size = abs(value) if self.is_log else max(abs(value), LEAST_STEP * (self.high - self.low))
        return self._within(value + share * size)

    def _within(self, value: float) -> float:
        return min(max(value, self.low), self.high)


@dataclass(frozen=True)
class Whole(Axis):
    """An integer between bounds."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)

    def step(self, value: Any, random: Random) -> int:
        size = max(1, round(STEP * abs(int(value))))
        return min(max(int(value) + random.choice((-size, size)), self.low), self.high)


@dataclass(frozen=True)
class PowerOfTwo(Axis):
    """A power of two between bounds."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        return 1 << random.randint(self.low.bit_length() - 1, self.high.bit_length() - 1)

    def step(self, value: Any, random: Random) -> int:
        return min(max(random.choice((int(value) // 2, int(value) * 2)), self.low), self.high)


@dataclass(frozen=True)
class Choice(Axis):
    """One of several values without an order."""

    choices: tuple[Any, ...]

    def draw(self, random: Random) -> Any:
        return random.choice(self.choices)

    def step(self, value: Any, random: Random) -> Any:  # noqa: ARG002 - choices have no neighbours
        return value


class Ranges:
    """A space given as a mapping of dotted paths to ranges and choices.

    Args:
        given: Ranges and choices by dotted path; see the table at the top of this module.
        job: Job that the settings belong to.

    Raises:
        SpecError: A path does not name a setting that may change, or a range is invalid.

    Example:
        >>> job = Job(model="mlp", data="digits")
        >>> space = Ranges({"optimizer.lr": (1e-4, 1e-1, "log"), "batch": (16, 128, "log2")}, job)
        >>> space.draw(job, Random(0))
        {'optimizer.lr': 0.03414..., 'batch': 128}
    """

    def __init__(self, given: Mapping[str, Any], job: Job) -> None:
        if not given:
            raise SpecError(
                "space={} has no setting to explore; give at least one, such as {'optimizer.lr': (1e-4, 1e-1, 'log')}"
            )
        self.axes: dict[str, Axis] = {}
        for path, value in given.items():
            check_path(job, path)
            self.axes[path] = _axis(path, value)

    def draw(self, job: Job, random: Random) -> dict[str, Any]:
        """Return random settings that are valid for `job`.

        Raises:
            SpecError: None of `ATTEMPTS` draws is valid; the message gives the reason for the last one.
        """
        for attempt in range(ATTEMPTS):
            settings = self._choose(job, lambda path: self.axes[path].draw(random))
            try:
                checked_rows(self.apply(job, settings))
            except SpecError as error:
                if attempt == ATTEMPTS - 1:
                    raise SpecError(
                        f"no valid job in {ATTEMPTS} draws from the space; the last: {error}"
                    ) from None
            else:
                break
        return settings

    def explore(self, job: Job, settings: Settings, random: Random, *, resample: float) -> dict[str, Any]:
        """Perturb or resample the given settings; return them unchanged if `ATTEMPTS` attempts give no valid job."""

        def move(path: str) -> Any:
            is_new = path not in settings or random.random() < resample
            return self.axes[path].draw(random) if is_new else self.axes[path].step(settings[path], random)

        for _ in range(ATTEMPTS):
            moved = self._choose(job, move)
            try:
                before, after = self.apply(job, settings), checked_rows(self.apply(job, moved))
                after.compression.check_follows(before.compression.name)
            except SpecError:
                continue
            return moved
        return dict(settings)

    def _choose(self, job: Job, value_of: Callable[[str], Any]) -> dict[str, Any]:  # noqa: ARG002 - branches need it
        """Return a value for each active setting."""
        return {path: value_of(path) for path in self.axes}

    def apply(self, job: Job, settings: Settings) -> Job:
        """Return `job` with these settings."""
        return with_settings(job, settings)

    def describe(self) -> dict[str, Any]:
        """Return the axes by path, as JSON."""
        return {path: [type(axis).__name__, *vars(axis).values()] for path, axis in self.axes.items()}


def _axis(path: str, value: Any) -> Axis:
    """Return the axis for a range or a list of choices."""
    if isinstance(value, list):
        if not value:
            raise SpecError(f"{path}=[] has nothing to choose from; give some values")
        return Choice(tuple(map(as_json, value)))
    numbers = isinstance(value, tuple) and len(value) in (2, 3) and all(map(_is_number, value[:2]))
    scale = value[2] if numbers and len(value) == 3 else "linear"
    if not numbers or scale not in ("linear", "log", "log2"):
        raise SpecError(
            f"{path}={value!r} is not a range; give (low, high), (low, high, 'log') or (low, high, 'log2') as a tuple, "
            "or choices as a list"
        )
    low, high = value[:2]
    if not low < high:
        raise SpecError(f"{path}={value!r} is empty; give the smaller bound first")
    if scale == "log2":
        return _powers(path, value)
    if scale == "log" and low <= 0:
        raise SpecError(
            f"{path}={value!r} has the lower bound {low}, which has no logarithm; use a bound above 0"
        )
    if scale == "linear" and isinstance(low, int) and isinstance(high, int):
        return Whole(low, high)
    return Number(float(low), float(high), scale == "log")


def _powers(path: str, value: Sequence[Any]) -> PowerOfTwo:
    for bound in value[:2]:
        if not isinstance(bound, int) or bound < 1 or bound & (bound - 1):
            raise SpecError(f"{path}={tuple(value)!r}: {bound} is not a power of two; use 1, 2, 4, 8, ...")
    return PowerOfTwo(*value[:2])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
