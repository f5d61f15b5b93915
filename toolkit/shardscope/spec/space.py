"""Search spaces: the settings of a job that a study searches over, and their ranges.

A space maps names of settings to ranges. A name is a path into the job. If a setting belongs to one of several choices,
the choice is written in brackets, and the setting is sampled only when that choice is sampled:

    Space({
        "optimizer": ["adamw", "lamb"],
        "optimizer[adamw].lr": (1e-4, 1e-2, "log"),
        "optimizer[lamb].lr": (1e-3, 1e-1, "log"),
        "batch": PowersOfTwo(32, 256),
        "compression": ["none", "topk"],
        "compression[topk].ratio": (0.001, 0.1, "log"),
        "warmup": (0.0, 0.3),
    })

The parameters of the Optuna study have the same names. Each choice therefore has its own parameters, whose
distributions are the same in all trials.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec import registry
from shardscope.spec._base import Spec
from shardscope.spec.compression import Compression
from shardscope.spec.lr_schedule import LRSchedule
from shardscope.spec.method import Method, methods_in
from shardscope.spec.numbers import Count, Number
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.strategy import Strategy

_KINDS: Mapping[str, type[Method]] = {
    "optimizer": Optimizer, "compression": Compression, "lr_schedule": LRSchedule,
}  # fmt: skip
BRANCHES = tuple(_KINDS)
"""Settings whose choices have nested settings."""
PLAIN = (
    "batch", "lr_rule", "warmup", "strategy", "precision", "recompute", "clip_norm", "world_size", "seed",
)  # fmt: skip
"""Settings without nested settings. ``warmup`` is a fraction of the steps. ``lr_rule`` (``none``, ``linear`` or
``sqrt``) scales the learning rate from the job's own batch size to the trial's batch size."""
LR_RULES = ("none", "linear", "sqrt")
_NAME = re.compile(r"(?P<owner>[a-z_]+)(\[(?P<branch>[a-z0-9-]+)\])?(\.(?P<setting>[a-z_0-9]+))?")

Value = str | Number | bool | None


class Choices(Spec):
    """A choice among several unordered values."""

    _positional = "values"

    kind: Literal["choices"] = "choices"
    values: tuple[Value, ...] = Field(min_length=1)
    """The values to choose from: at least one, without duplicates."""

    @model_validator(mode="after")
    def _check_duplicates(self) -> Self:
        if len({(type(value), value) for value in self.values}) < len(self.values):
            raise SpecError(
                f"values={quoted(list(self.values))} contain a choice twice; list each choice once"
            )
        return self

    def ends(self) -> tuple[Value, ...]:
        """Return the values for which the job is validated before the study starts: all values."""
        return self.values


class Between(Spec):
    """A number in a closed interval."""

    kind: Literal["between"] = "between"
    low: Number
    high: Number
    """Upper end, above `low`. If both ends are integers, only integers are sampled."""
    log: bool = False
    """Whether to sample the logarithm uniformly; requires `low` above 0."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise SpecError(
                f"low={self.low} and high={self.high} are not an interval; give finite numbers with low < high"
            )
        if self.log and self.low <= 0:
            raise SpecError(
                f"low={self.low} is not valid with log=True; give a low above 0, or leave log out"
            )
        return self

    @property
    def is_whole(self) -> bool:
        """Whether only integers are sampled."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def ends(self) -> tuple[Value, ...]:
        """Return the values for which the job is validated before the study starts: both ends."""
        return self.low, self.high


class PowersOfTwo(Spec):
    """A power of two between `low` and `high`, whose exponent a study samples."""

    kind: Literal["powers-of-two"] = "powers-of-two"
    low: Count
    """A power of two, at least 1."""
    high: Count
    """A power of two, at least `low`."""

    def __init__(self, *ends: int, **fields: Any) -> None:
        if ends:
            fields = {**dict(zip(("low", "high"), ends, strict=False)), **fields}
        super().__init__(**fields)

    @model_validator(mode="after")
    def _powers(self) -> Self:
        for name, value in (("low", self.low), ("high", self.high)):
            if value & (value - 1):
                near = 2 ** round(math.log2(value))
                raise SpecError(f"{name}={value} is not a power of two; use for example {near}")
        if self.low > self.high:
            raise SpecError(f"low={self.low} is above high={self.high}; swap them")
        return self

    @property
    def exponents(self) -> tuple[int, int]:
        """The lowest and the highest exponent."""
        return self.low.bit_length() - 1, self.high.bit_length() - 1

    def ends(self) -> tuple[Value, ...]:
        """Return the values for which the job is validated before the study starts: both ends."""
        return self.low, self.high


_WRITE = "write (low, high), (low, high, 'log'), (low, high, 'log2') or a list of choices"


def _powers(low: Any, high: Any) -> PowersOfTwo:
    for end in (low, high):
        if not isinstance(end, int):
            raise SpecError(f"{quoted(end)} is not a power of two; use 1, 2, 4, 8, ...")
    return PowersOfTwo(low=low, high=high)


def _parameter(value: Any) -> Any:
    """Convert a list to choices, and a tuple of two numbers to an interval.

    A third item ``"log"`` makes the interval logarithmic; ``"log2"`` selects the powers of two between the numbers.
    """
    if isinstance(value, list):
        return Choices(values=tuple(value))
    if isinstance(value, str | int | float):
        raise SpecError(f"{quoted(value)} is not a range; {_WRITE}")
    if isinstance(value, tuple):
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in value[:2])
        if len(value) not in (2, 3) or not numbers or value[2:] not in ((), ("log",), ("log2",)):
            raise SpecError(f"{quoted(value)} is not a range; {_WRITE}")
        if value[2:] == ("log2",):
            return _powers(value[0], value[1])
        return Between(low=value[0], high=value[1], log=len(value) == 3)
    return value


Parameter = Annotated[
    Annotated[Choices | Between | PowersOfTwo, Discriminator("kind")], BeforeValidator(_parameter)
]


class Name(NamedTuple):
    """The parts of a parameter's name."""

    owner: str
    branch: str | None
    setting: str | None


def parse_name(name: str) -> Name:
    """Split a parameter's name into its parts.

    Raises:
        SpecError: The name does not refer to a setting that a study can change.

    Example:
        >>> parse_name("compression[topk].ratio")
        Name(owner='compression', branch='topk', setting='ratio')
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise SpecError(
            f"space: {quoted(name)} is not the name of a setting; write for example 'optimizer[lamb].lr'"
        )
    parts = Name(found["owner"], found["branch"], found["setting"])
    if parts.owner not in (*BRANCHES, *PLAIN):
        nested = [f"{owner}.{parts.owner}" for owner in BRANCHES if parts.owner in _nested(owner)]
        if nested:
            raise SpecError(
                f"space: setting={quoted(parts.owner)} is not known; did you mean {' or '.join(map(repr, nested))}?"
            )
        raise unknown_name("space: setting", parts.owner, (*BRANCHES, *PLAIN))
    if parts.owner in PLAIN and (parts.branch or parts.setting):
        raise SpecError(f"space: {parts.owner!r} has no nested settings; write {parts.owner!r} alone")
    if parts.branch and not parts.setting:
        raise SpecError(
            f"space: {name!r} names a choice but none of its settings; write for example {name + '.lr'!r}"
        )
    if parts.setting:
        _check_setting(name, parts)
    return parts


def _check_setting(name: str, parts: Name) -> None:
    table = _table(parts.owner)
    if parts.branch and parts.branch not in table:
        raise unknown_name(f"space: {parts.owner}", parts.branch, table)
    valid = sorted({s for branch in ([parts.branch] if parts.branch else table) for s in table[branch]})
    if parts.setting not in valid:
        raise unknown_name(f"space: {parts.branch or parts.owner} setting", parts.setting, valid)
    if parts.setting == "betas":
        raise SpecError(
            f"space: {name!r} is a pair of numbers, which a study cannot sample; set it in the job"
        )


def _nested(owner: str) -> set[str]:
    """Return the settings that any choice of `owner` has."""
    return {setting for settings in _table(owner).values() for setting in settings}


def _table(owner: str) -> Mapping[str, Mapping[str, Any]]:
    return _defaults(registry.all_of(_KINDS[owner]))


@lru_cache(maxsize=8)
def _defaults(known: tuple[type[Method], ...]) -> Mapping[str, Mapping[str, Any]]:
    return {method.name: method().settings for method in known}


def settings_of(owner: str, branch: str) -> Mapping[str, Any]:
    """Return the settings of one choice (`branch`) of an `owner` in `BRANCHES`, with their defaults.

    Raises:
        SpecError: There is no such choice.
    """
    settings: Mapping[str, Any] = _KINDS[owner].by_name(branch).settings
    return settings


def _readable(name: str, value: Any) -> Any:
    """Return the parameter for a value given by the user; its ends are floats if the setting accepts fractions."""
    parts = parse_name(name)
    try:
        parameter = _parameter(value)
    except SpecError as error:
        raise SpecError(f"space[{name!r}]: {error}") from None
    if isinstance(parameter, Between) and name == "batch":
        raise SpecError(
            f"space['batch'] cannot be an interval, since ranks must divide a batch evenly; write ({parameter.low}, "
            f"{parameter.high}, 'log2') with powers of two, or a list such as [48, 96]"
        )
    if isinstance(parameter, Between) and parameter.is_whole and _takes_fractions(parts):
        return Between(low=float(parameter.low), high=float(parameter.high), log=parameter.log)
    return parameter


def _takes_fractions(parts: Name) -> bool:
    """Return whether a setting accepts fractions, so that (0, 1) is an interval of floats and not of integers."""
    if parts.setting is None:
        return parts.owner in ("warmup", "clip_norm")
    table = _table(parts.owner)
    defaults = [table[b].get(parts.setting) for b in ([parts.branch] if parts.branch else table)]
    return any(isinstance(default, float) or default == "off" for default in defaults)


class Space(Spec):
    """The settings of a job that a study searches over, with their ranges.

    Example:
        >>> space = Space({"optimizer.lr": (1e-4, 1e-2, "log"), "batch": PowersOfTwo(32, 128)})
        >>> space.parameters["batch"].exponents
        (5, 7)
    """

    _positional = "parameters"

    parameters: dict[str, Parameter] = Field(min_length=1)
    """Parameters by name; at least one."""

    @model_validator(mode="before")
    @classmethod
    def _readable_names(cls, fields: Any) -> Any:
        given = fields.get("parameters") if isinstance(fields, dict) else None
        if not isinstance(given, Mapping):
            return fields
        return {**fields, "parameters": {name: _readable(str(name), value) for name, value in given.items()}}

    @model_validator(mode="after")
    def _check_branches(self) -> Self:
        for name, parameter in self.parameters.items():
            parts = parse_name(name)
            self._check_kind(name, parts, parameter)
            chosen = self.parameters.get(parts.owner)
            if parts.branch and isinstance(chosen, Choices) and parts.branch not in chosen.values:
                raise SpecError(
                    f"space[{name!r}] is never used: {parts.owner!r} has no choice {parts.branch!r}; "
                    f"add it to {list(chosen.values)!r}, or leave this parameter out"
                )
        return self

    def _check_kind(self, name: str, parts: Name, parameter: Choices | Between | PowersOfTwo) -> None:
        if parts.setting is None and parts.owner in (
            *BRANCHES,
            "strategy",
            "precision",
            "recompute",
        ):
            if not isinstance(parameter, Choices):
                raise SpecError(f"space[{name!r}] must be a list of choices, got {parameter!r}")
            if parts.owner in BRANCHES:
                for value in parameter.values:
                    if value not in _table(parts.owner):
                        raise unknown_name(f"space: {parts.owner}", value, _table(parts.owner))
        if parts.owner == "warmup" and not all(
            isinstance(end, int | float) and 0 <= end <= 1 for end in parameter.ends()
        ):
            raise SpecError(
                f"space['warmup'] must be a fraction of the steps, from 0 to 1, got {parameter!r}"
            )
        if parts.owner == "lr_rule" and (
            not isinstance(parameter, Choices) or set(parameter.values) - set(LR_RULES)
        ):
            raise SpecError(
                f"space['lr_rule'] must be a list of choices from {', '.join(LR_RULES)}, got {parameter!r}"
            )

    def methods(self) -> Iterator[tuple[str, Method]]:
        """Yield pairs of a field path and a method, as in `Job.methods`, for all methods among the choices."""
        kinds: dict[str, type[Method]] = {**_KINDS, "strategy": Strategy}
        for axis, kind in kinds.items():
            parameter = self.parameters.get(axis)
            for value in parameter.values if isinstance(parameter, Choices) else ():
                yield from methods_in(axis, kind.resolve(value))

    def active(self, chosen: Mapping[str, Value], defaults: Mapping[str, str]) -> Iterator[str]:
        """Yield the names of the parameters to sample; a choice comes before the settings that depend on it.

        Args:
            chosen: Values sampled so far; the caller may add to it during the iteration.
            defaults: The job's own choice for each setting in `BRANCHES` that the space does not search.
        """
        order = sorted(self.parameters, key=lambda name: parse_name(name).setting is not None)
        for name in order:
            parts = parse_name(name)
            if parts.setting is None:
                yield name
                continue
            branch = str(chosen[parts.owner] if parts.owner in chosen else defaults[parts.owner])
            own = f"{parts.owner}[{branch}].{parts.setting}"
            if parts.branch == branch or (
                parts.branch is None
                and own not in self.parameters
                and parts.setting in settings_of(parts.owner, branch)
            ):
                yield name
