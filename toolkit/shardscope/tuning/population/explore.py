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

Settings are named by dotted paths, such as ``optimizer.lr``, or by the names of a study's `Space` with its branches. A
setting that belongs to a branch exists only while that branch is chosen: a clone that changes the branch samples the
settings of the new branch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import Job, Method
from shardscope.spec._base import Spec
from shardscope.spec.space import Between, Choices, PowersOfTwo, Space, parse_name
from shardscope.tuning.apply import apply, branches_of, check, checked_rows

Settings = Mapping[str, Any]
"""Settings by dotted path. Values are JSON: a number, a string, or the fields of a part of the job."""

MAY_CHANGE = ("optimizer", "lr_schedule", "batch", "compression", "clip_norm", "strategy", "recompute")
"""Fields of a job that may change without making a checkpoint unusable."""


def check_path(job: Job, path: str) -> None:
    """Reject a path that does not name a setting of `job` that may change during training.

    Raises:
        SpecError: The path is unknown; the message suggests the closest valid one.
    """
    head, _, leaf = path.partition(".")
    if head not in MAY_CHANGE:
        raise unknown_name("setting of the space", path, MAY_CHANGE)
    if leaf:
        part = getattr(job, head)
        fields = list(type(part).model_fields) if isinstance(part, Spec) else []
        fields += ["name"] * isinstance(part, Method)
        if leaf not in fields:
            raise unknown_name("setting of the space", path, [f"{head}.{field}" for field in fields])


def with_settings(job: Job, settings: Settings) -> Job:
    """Return `job` with its settings changed.

    Args:
        job: The job to change.
        settings: New values by dotted path.

    Raises:
        SpecError: The settings are invalid for the job.

    Example:
        >>> job = Job(model="mlp", data="digits")
        >>> with_settings(job, {"optimizer.lr": 0.01, "batch": 32}).batch.global_batch
        32
    """
    changes: dict[str, Any] = {path: value for path, value in settings.items() if "." not in path}
    parts: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        head, _, leaf = path.partition(".")
        if leaf:
            parts.setdefault(head, {})[leaf] = value
    job = job.replace(**changes) if changes else job
    return job.replace(**{head: _with_fields(getattr(job, head), fields) for head, fields in parts.items()})


def _with_fields(part: Spec, fields: Mapping[str, Any]) -> Spec:
    """Return a part of a job with `fields` changed; a new method keeps the fields that were set explicitly."""
    if isinstance(part, Method) and "name" in fields:
        other: Spec = part.base_class().by_name(**{**part.changed, **fields})
        return other
    return part.replace(**fields)


def as_json(value: Any) -> Any:
    """Return a setting as JSON; a part of a job becomes the dictionary of its fields."""
    if isinstance(value, Spec):
        return value.model_dump(mode="json", exclude_none=True, exclude_defaults=isinstance(value, Method))
    return value


STEP = 0.2
"""Size of a perturbation, as a fraction of the value (Jaderberg et al. 2017, appendix A: factors of 0.8 and 1.2)."""
LEAST_STEP = 0.05
"""In a linear range, a perturbation is `STEP` times the value or times this fraction of the range, whichever is larger,
so that a value of zero can change."""
ATTEMPTS = 50
"""Number of draws without a valid job after which a space counts as invalid, or a member keeps its settings."""


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


Axis = Choices | Between | PowersOfTwo | tuple[Any, ...]
"""Range or choices of one setting. A tuple holds choices among whole parts of a job, which a `Space` cannot express."""


def drawn(axis: Axis, random: Random) -> Any:
    """Return a random value."""
    if isinstance(axis, PowersOfTwo):
        return 1 << random.randint(*axis.exponents)
    if not isinstance(axis, Between):
        return random.choice(axis.values if isinstance(axis, Choices) else axis)
    if axis.is_whole:
        return random.randint(int(axis.low), int(axis.high))
    if axis.log:
        return _within(axis, math.exp(random.uniform(math.log(axis.low), math.log(axis.high))))
    return random.uniform(axis.low, axis.high)


def perturbed(axis: Axis, value: Any, random: Random) -> Any:
    """Return a perturbed copy of `value`; a choice is returned unchanged because choices have no order."""
    if isinstance(axis, PowersOfTwo):
        return min(max(random.choice((int(value) // 2, int(value) * 2)), axis.low), axis.high)
    if not isinstance(axis, Between):
        return value
    if axis.is_whole:
        size = max(1, round(STEP * abs(int(value))))
        return int(_within(axis, int(value) + random.choice((-size, size))))
    share = random.choice((-STEP, STEP))
    size = abs(value) if axis.log else max(abs(value), LEAST_STEP * (axis.high - axis.low))
    return _within(axis, value + share * size)


def _within(axis: Between, value: float) -> float:
    return min(max(value, float(axis.low)), float(axis.high))


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
            SpecError: None of `ATTEMPTS` draws is valid; the message gives the reason for the last draw.
        """
        for attempt in range(ATTEMPTS):
            settings = self._choose(job, lambda path: drawn(self.axes[path], random))
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
            axis = self.axes[path]
            return drawn(axis, random) if is_new else perturbed(axis, settings[path], random)

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
        return {path: _described(axis) for path, axis in self.axes.items()}


def _described(axis: Axis) -> list[Any]:
    if isinstance(axis, PowersOfTwo):
        return ["PowerOfTwo", axis.low, axis.high]
    if not isinstance(axis, Between):
        return ["Choice", axis]
    return ["Whole", axis.low, axis.high] if axis.is_whole else ["Number", axis.low, axis.high, axis.log]


def _axis(path: str, value: Any) -> Axis:
    """Return the axis for a range or a list of choices."""
    if isinstance(value, list):
        if not value:
            raise SpecError(f"{path}=[] has nothing to choose from; give some values")
        return tuple(map(as_json, value))
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
        return Between(low=low, high=high)
    return Between(low=float(low), high=float(high), log=scale == "log")


def _powers(path: str, value: Sequence[Any]) -> PowersOfTwo:
    for bound in value[:2]:
        if not isinstance(bound, int) or bound < 1 or bound & (bound - 1):
            raise SpecError(f"{path}={tuple(value)!r}: {bound} is not a power of two; use 1, 2, 4, 8, ...")
    return PowersOfTwo(*value[:2])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
        self.axes = dict(space.parameters)

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
