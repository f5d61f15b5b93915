"""One training step of a module as its memory sees it: the moments at which nothing else holds more.

A module is run in *units*: its blocks, which a sharded strategy gathers and reduces one at a time, and what lies around
them, unit 0. A step is traced once for each way to recompute; each trace is a list of `Moment`s. What is alive at
a moment is given by what it grows with: activations with the batch, gradients with the parameters. What a strategy
holds besides (shards, gathered units, buffers) follows from the unit and from how many of them are done.
"""

from __future__ import annotations

from math import prod
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.numbers import Total

Phase = Literal["enter", "forward", "loss", "turn", "backward", "leave"]
"""`enter` and `turn`: just before a unit's forward and its backward pass; `leave`: just after its backward pass."""
RECOMPUTE_MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


class Moment(Spec):
    """What is alive besides parameters, inputs and what an optimizer keeps, in bytes."""

    phase: Phase
    unit: Total
    """The one that runs; 0 is what lies around the others."""
    done: Total
    """Units other than 0 whose pass in this direction is over."""
    activations: NonNegativeFloat
    """Saved tensors, results and their gradients, for one sample."""
    arriving: NonNegativeFloat = 0.0
    """Gradients of parameters that an operation has just made, or that wait for others to be added to them."""
    own: NonNegativeFloat = 0.0
    """Gradients of the running unit's parameters that are in place."""
    around: NonNegativeFloat = 0.0
    """The same of unit 0."""


class ParameterRow(Spec):
    """One parameter tensor."""

    unit: Total
    shape: tuple[Total, ...]
    is_trained: bool = True

    @property
    def num_elements(self) -> int:
        """1 for a single number."""
        return prod(self.shape)


class PipelinePiece(Spec):
    """One layer of those that a pipeline can cut between."""

    output_bytes: NonNegativeFloat
    """What it hands on, for one sample."""
    flops: NonNegativeFloat
    """FLOP of its forward pass, for one sample."""
    stored_bytes: NonNegativeFloat
    """What it saves for the backward pass, for one sample."""
    parameters: tuple[Total, ...]
    """Those that it uses, by their place among all parameters."""
    buffers: tuple[Total, ...] = ()
    """The buffers that it uses, by their place among all."""


class StepTrace(Spec):
    """A step of a module with a loss on its output. `Model.from_module(..., memory=True)` makes one."""

    units: tuple[str, ...]
    """Names, in the order in which they run; the first is unit 0, the module around them."""
    parameters: tuple[ParameterRow, ...]
    """All parameters, in the module's order; one that is used twice counts once."""
    buffer_bytes: NonNegativeFloat
    output_bytes: NonNegativeFloat
    """What the module returns, for one sample."""
    num_outputs: Total = 1
    """Numbers that it returns, for one sample."""
    buffer_sizes: tuple[Total, ...] = ()
    """Bytes of each buffer, in the module's order."""
    gradient_order: tuple[Total, ...] = ()
    """The trained parameters, by their place among all, in the order in which the backward pass finishes them."""
    pieces: tuple[PipelinePiece, ...] = ()
    """In the order in which they run; none where the module cannot be cut."""
    moments: dict[str, tuple[Moment, ...]]
    """By what is recomputed: ``none``, ``selective``, ``full``."""
    saved_bytes: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """The most that is saved for the backward pass, for one sample, by what is recomputed; none where the loss was not
    traced, and moments hold only the model."""
    loss_bytes: NonNegativeFloat = 0.0
    """What of it the loss saves without recomputation, for one sample."""
    num_operations: Total = 0
    """Operations of the step that compute something, views left out."""
    moved_bytes: NonNegativeFloat = 0.0
    """What operations other than matrix products read and write, for one sample."""

    @property
    def running(self) -> set[int]:
        """The units that the forward pass comes to, and what is around them."""
        return {0, *(moment.unit for moment in self.moments.get("none", ()))}

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = range(len(self.units))
        used = {row.unit for row in self.parameters}
        used |= {moment.unit for moments in self.moments.values() for moment in moments}
        strange = [unit for unit in sorted(used) if unit not in known]
        if strange:
            raise SpecError(
                f"unit={strange[0]} is not one of the {len(known)} units; use 0 to {len(known) - 1}"
            )
        return self
