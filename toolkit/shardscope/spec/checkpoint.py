"""When and how a job saves checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, field_validator, model_validator

from shardscope.errors import SpecError, quoted
from shardscope.spec._base import Spec
from shardscope.spec.numbers import LARGEST_COUNT, Count
from shardscope.spec.units import Seconds

if TYPE_CHECKING:
    from shardscope.spec.job import Job

AUTO = "auto"


class Checkpoint(Spec):
    """When to save checkpoints, how to write them, and how many to keep.

    Example:
        >>> Checkpoint(every=100, asynchronous=True).every
        100
    """

    _positional = "every"

    every: Count | Literal["auto"] | None = None
    """Steps between two checkpoints; None saves none during training. ``"auto"`` saves one after a few steps, measures
    its cost, and continues at the interval that minimises the time lost at the failure rate given by `mtbf_s`."""
    at_end: bool = False
    """Also save after the last step, and when the run is stopped."""
    keep: Count = 2
    """Number of checkpoints to keep, at least 1; older ones are deleted after a newer one is complete."""
    asynchronous: bool = False
    """Whether training continues while a checkpoint is written: it waits only until each rank has copied its part of
    the state to host memory, which stays allocated. A save waits for the previous one to be complete. If a checkpoint
    cannot be written, the run fails at its next step."""
    incremental: bool = False
    """Whether to write only tensors that have changed since the previous checkpoint, such as those that are not frozen.
    Unchanged tensors are hard links to files of earlier checkpoints, and stay on disk when those are deleted. Every
    checkpoint is complete, but if a shared file is corrupt, so are all checkpoints that share it."""
    mtbf_s: Seconds | None = None
    """With `every="auto"`: mean time between two failures of the whole job, in seconds or with a unit."""

    @field_validator("every", mode="before")
    @classmethod
    def _check_every(cls, value: Any) -> Any:
        if isinstance(value, str) and value.isdecimal():  # as on the command line
            value = int(value)
        is_count = isinstance(value, int) and 1 <= value <= LARGEST_COUNT
        if value is None or value == AUTO or is_count:
            return value
        raise SpecError(
            f"checkpoint.every={quoted(value)} is not valid: give a number of steps, 1 to {LARGEST_COUNT}, or 'auto'"
        )

    @model_validator(mode="after")
    def _check_mtbf(self) -> Self:
        if self.every == AUTO and not self.mtbf_s:
            raise SpecError(
                "checkpoint.every='auto' needs the mean time between failures; give mtbf_s, such as mtbf_s='6 h'"
            )
        if self.every != AUTO and self.mtbf_s is not None:
            raise SpecError(
                f"checkpoint.mtbf_s={self.mtbf_s:g} has no effect with every={self.every}; give every='auto', or leave "
                "mtbf_s out"
            )
        return self

    def check(self, job: Job) -> None:
        """Reject `asynchronous` and `incremental` in a job that never saves a checkpoint.

        Raises:
            SpecError: The message states the field and a remedy.
        """
        named = next((name for name in ("asynchronous", "incremental") if getattr(self, name)), None)
        if named is not None and not job.saves_checkpoints:
            raise SpecError(
                f"checkpoint.{named}=True has no effect in a job that saves no checkpoints; set for example every=100 "
                "or at_end=True"
            )

    @property
    def is_on(self) -> bool:
        """Whether any checkpoints are saved, during training or at its end."""
        return self.at_end or self.every is not None


def _checkpoint(value: Any) -> Any:
    """Convert a number of steps between checkpoints, or the JSON fields of a `Checkpoint`."""
    if isinstance(value, dict):
        return Checkpoint.from_fields(value)
    return Checkpoint(every=value) if isinstance(value, int | float | str) else value


CheckpointOrSteps = Annotated[Checkpoint, BeforeValidator(_checkpoint)]
"""A field that accepts a `Checkpoint`, or the number of steps between two checkpoints."""


def daly_interval(save: Any, mtbf: Any) -> Any:
    """Return the training time between two checkpoints that loses the least time, in the unit of the arguments.

    Daly 2006, equation 37; see `analytic.reliability.daly_interval_s`. This version has no NumPy checks, and ranks use
    it to choose their interval.

    Args:
        save: Time for which saving a checkpoint delays training; a float or an array.
        mtbf: Mean time between failures; a float or an array.
    """
    ratio = save / (2 * mtbf)
    higher = (2 * save * mtbf) ** 0.5 * (1 + ratio**0.5 / 3 + ratio / 9) - save
    return higher * (ratio < 1) + mtbf * (ratio >= 1)
