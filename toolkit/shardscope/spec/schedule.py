"""Schedules: how the learning rate moves over the steps, and how it follows the batch size."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec._base import Spec
from shardscope.spec.numbers import CountOrZero

SHAPES: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "constant": {},
        "linear": {"final_ratio": 0.0},
        "sqrt": {},
        "polynomial": {"final_ratio": 0.0, "power": 2.0},
        "cosine": {"final_ratio": 0.0},
        "exponential": {"final_ratio": 0.01},
    }
)
"""The settings that only some shapes take, with their defaults; all take `warmup_steps`."""
SCALING_EXPONENTS: MappingProxyType[str, float] = MappingProxyType({"linear": 1.0, "sqrt": 0.5})
"""How learning rates follow the batch size: by which power of it, rule by rule."""


class Schedule(Spec):
    """The shape of the learning rate over a run: a linear warm-up, then constant or falling.

    Example:
        >>> Schedule("polynomial", warmup_steps=10).settings["power"]
        2.0
    """

    _positional = "name"

    name: str = "constant"
    """``constant``, ``linear``, ``sqrt`` (falls with the inverse square root of the step), ``polynomial``, ``cosine``,
    or ``exponential`` (the same factor from step to step; it may rise)."""
    warmup_steps: CountOrZero = 0
    """Steps over which the rate first rises, linearly, to its full value. At least 0, at most all steps."""
    power: float | None = Field(default=None, gt=0, le=1000)
    """polynomial: exponent of the fall, above 0 and at most 1000. Default 2, as LARS uses it; 1 is ``linear``."""
    final_ratio: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """linear, polynomial, cosine: what is left of the rate just after the last step, 0 to 1. Default 0. exponential:
    above 0, and above 1 the rate rises, as in a range test. Default 0.01."""

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str) -> str:
        if name not in SHAPES:
            raise unknown_name("schedule", name, SHAPES)
        return name

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        for field in ("power", "final_ratio"):
            value = getattr(self, field)
            if value is not None and field not in SHAPES[self.name]:
                users = " or ".join(name for name, settings in SHAPES.items() if field in settings)
                raise SpecError(
                    f"schedule.{field}={value!r} has no effect on {self.name}; leave it out, or use {users}"
                )
        self._check_final_ratio()
        return self

    def _check_final_ratio(self) -> None:
        ratio = self.final_ratio
        if ratio is None:
            return
        if self.name == "exponential" and ratio == 0:
            raise SpecError("schedule.final_ratio=0 is never reached by exponential; use a value above 0")
        if self.name != "exponential" and ratio > 1:
            raise SpecError(
                f"schedule.final_ratio={ratio:g} is above 1, and {self.name} only falls; use 0 to 1, or exponential"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting that has an effect on this shape, with its value."""
        defaults = SHAPES[self.name]
        given = {field: getattr(self, field) for field in defaults if getattr(self, field) is not None}
        return {"warmup_steps": self.warmup_steps, **defaults, **given}
