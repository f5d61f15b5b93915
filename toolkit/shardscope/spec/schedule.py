"""Schedules: how the learning rate moves over the steps, and how it follows the batch size."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec._base import Spec

SHAPES: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "constant": {},
        "linear": {"final_ratio": 0.0},
        "sqrt": {},
        "polynomial": {"final_ratio": 0.0, "power": 2.0},
        "cosine": {"final_ratio": 0.0},
    }
)
"""The settings that only some shapes take, with their defaults; all take `warmup_steps`."""


class Schedule(Spec):
    """The shape of the learning rate over a run: a linear warm-up, then constant or falling.

    Example:
        >>> Schedule("polynomial", warmup_steps=10).settings["power"]
        2.0
    """

    _positional = "name"

    name: str = "constant"
    """``constant``, ``linear``, ``sqrt`` (falls with the inverse square root of the step), ``polynomial`` or
    ``cosine``."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate first rises, linearly, to its full value. At least 0, at most all steps."""
    power: float | None = Field(default=None, gt=0)
    """polynomial: exponent of the fall, above 0. Default 2, as LARS uses it; 1 is ``linear``."""
    final_ratio: float | None = Field(default=None, ge=0, le=1)
    """linear, polynomial, cosine: what is left of the rate just after the last step, 0 to 1. Default 0."""

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
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting that has an effect on this shape, with its value."""
        defaults = SHAPES[self.name]
        given = {field: getattr(self, field) for field in defaults if getattr(self, field) is not None}
        return {"warmup_steps": self.warmup_steps, **defaults, **given}


def scaled_lr(lr: float, batch: float, base_batch: float, rule: Literal["linear", "sqrt"]) -> float:
    """The learning rate for another batch size.

    ``linear`` is Goyal et al. (2017), for SGD and LARS; ``sqrt`` is You et al. (LAMB, 2020), for adaptive
    optimizers.

    Args:
        lr: A learning rate that works at `base_batch`.
        batch: Global batch size to scale to, in samples.
        base_batch: Global batch size that `lr` was found at, in samples.
        rule: How the learning rate grows with the batch.

    Raises:
        SpecError: Unknown rule, or a batch size that is not above 0.

    Example:
        >>> scaled_lr(0.1, 1024, 256, "linear"), scaled_lr(0.1, 1024, 256, "sqrt")
        (0.4, 0.2)
    """
    if not (batch > 0 and base_batch > 0):
        raise SpecError(f"batch={batch} and base_batch={base_batch} are batch sizes; both are above 0")
    growth = batch / base_batch
    if rule == "linear":
        return lr * growth
    if rule == "sqrt":
        return lr * math.sqrt(growth)
    raise unknown_name("rule", rule, ("linear", "sqrt"))
