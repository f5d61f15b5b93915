"""Memory of a module during one training step: a list of the moments at which memory may peak.

A module is divided into *units*: its blocks, which a sharded strategy gathers and reduces one at a time, and the root
unit around them, unit 0. A step is traced once per recomputation mode; each trace is a list of `Moment`s. The live
bytes at a moment are split into activations, which scale with the batch, and gradients, which scale with the
parameters. Memory that a strategy adds (shards, gathered units, buffers) follows from the unit that is running and the
number of finished units.
"""

from __future__ import annotations

from math import prod
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.numbers import Total

Phase = Literal["enter", "forward", "loss", "turn", "backward", "leave"]
"""`enter`: just before a unit's forward pass; `turn` and `leave`: just before and just after its backward pass."""
RECOMPUTE_MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


class Moment(Spec):
    """Live bytes at one moment, not counting parameters, inputs and optimizer state."""

    phase: Phase
    unit: Total
    """Index of the unit that is running; 0 is the root unit around all other units."""
    done: Total
    """Number of units, without unit 0, that have finished the current pass (forward or backward)."""
    activations: NonNegativeFloat
    """Bytes of saved tensors, intermediate results and their gradients, for one sample."""
    arriving: NonNegativeFloat = 0.0
    """Bytes of parameter gradients that an operation has just computed, or that are not fully accumulated yet."""
    own: NonNegativeFloat = 0.0
    """Bytes of gradients accumulated for the running unit's parameters."""
    around: NonNegativeFloat = 0.0
    """Bytes of gradients accumulated for unit 0's parameters."""
    saved: NonNegativeFloat = 0.0
    """Peak bytes saved for the backward pass during this phase of the unit, for one sample."""
    outputs: NonNegativeFloat = 0.0
    """Part of `activations` that the unit's output and its gradient take, for one sample."""
    inputs: NonNegativeFloat = 0.0
    """At `enter`, `turn` and `leave`: the part of `activations` that the unit's inputs take, for one sample."""


class ParameterRow(Spec):
    """One parameter tensor."""

    unit: Total
    shape: tuple[Total, ...]
    is_trained: bool = True
    is_divided: bool = False
    """Whether it is a part of a tensor that is divided over tensor or expert ranks."""
    is_expert: bool = False
    """Whether it is a parameter of experts that are distributed over expert ranks."""
    is_repeated: bool = False
    """Whether several stages of a pipeline use it on one of its ranks, so that ZeRO 2 and 3 do not shard it."""

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether each rank has all of it in ZeRO 2 and 3, as of a scalar, which cannot be sharded."""
        return self.is_repeated or not self.shape


class AxisMessage(Spec):
    """One collective of the tensor, context or expert axis in a pass, as the layers of a divided model call it."""

    axis: str = "tensor"
    op: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``; ``send`` is a message to the next rank."""
    phase: Literal["forward", "backward", "weights"]
    """The pass; ``weights`` is the backward pass for weights, if that for inputs is a pass of its own."""
    sample_bytes: NonNegativeFloat = 0.0
    """Bytes of the whole tensor, for one sample; 0 if they do not depend on the batch."""
    fixed_bytes: Total = 0
    """Bytes of the whole tensor, if they do not depend on the batch, as of the gradients of parameters."""
    micro_batches: frozenset[Total] | None = None
    """The micro-batches whose passes call it; None for all."""

    def is_called(self, micro_batch: int) -> bool:
        """Return whether the passes of a micro-batch call it."""
        return self.micro_batches is None or micro_batch in self.micro_batches


class SplitBackward(Spec):
    """Memory of a layer in a backward pass that is split into one for inputs and one for weights.

    Bytes of activations, which include gradients of activations, are those of one sample.
    """

    for_inputs: float = 0.0
    """By how much activations grow in the pass for inputs, at most, without the gradient of the layer's output."""
    between: float = 0.0
    """By how much they have grown after it, without the gradients of the layer's input and output."""
    of_output: NonNegativeFloat = 0.0
    """Part of the gradient of the layer's output that the pass for weights needs too."""
    for_weights: tuple[tuple[float, float, float, float], ...] = ()
    """The moments of highest memory in the pass for weights: by how much activations have grown since its start, bytes
    of gradients of parameters that are being computed, of those that are complete, and of those computed last."""
    left: float = 0.0
    """By how much activations have grown from the start of the pass for weights to its end; negative, as it frees them.
    """
    last_group: NonNegativeFloat = 0.0
    """Bytes of the gradients that the pass for weights computes last."""
    in_reverse: bool = False
    """Whether the pass for weights of a stage with this layer runs the last layer first; see `one_pass_for_weights`."""


class PipelinePiece(Spec):
    """One layer of a module; a pipeline can split the module before and after the layer."""

    output_bytes: NonNegativeFloat
    """Bytes of the layer's output, for one sample."""
    flops: NonNegativeFloat
    """FLOP of the layer's forward pass, for one sample."""
    stored_bytes: NonNegativeFloat
    """Bytes that the layer saves for the backward pass, for one sample."""
    parameters: tuple[Total, ...]
    """Indices of the parameters that the layer uses."""
    buffers: tuple[Total, ...] = ()
    """Indices of the buffers that the layer uses."""
    messages: dict[str, tuple[AxisMessage, ...]] = Field(default_factory=dict)
    """The part of `StepTrace.messages` that the layer's own passes call."""
    split_messages: dict[str, tuple[AxisMessage, ...]] = Field(default_factory=dict)
    """The same if the backward pass is split into one for inputs and one for weights."""
    recompute: dict[str, tuple[NonNegativeFloat, NonNegativeFloat]] = Field(default_factory=dict)
    """By recomputation mode other than ``none``, for one sample: bytes that the layer saves for the backward pass, and
    the bytes by which they grow in that pass, at most."""
    recompute_split: dict[str, tuple[float, float, float]] = Field(default_factory=dict)
    """By recomputation mode other than ``none``, for one sample: the bytes by which the saved bytes grow in a split
    backward pass: in the pass for inputs, at most; after it; and in the pass for weights, at most."""

    split: dict[str, SplitBackward] = Field(default_factory=dict)
    """Memory of a split backward pass, by recomputation mode; without those modes in which PyTorch cannot split it."""
    not_split: dict[str, str] = Field(default_factory=dict)
    """The error of a split backward pass, by the other recomputation modes."""

    def saved(self, mode: str) -> float:
        """Return the bytes that the layer saves for the backward pass in a recomputation mode, for one sample."""
        return self.recompute.get(mode, (self.stored_bytes, 0.0))[0]

    def recomputed(self, mode: str) -> float:
        """Return the bytes by which the saved bytes grow in the backward pass, for one sample."""
        return self.recompute.get(mode, (self.stored_bytes, 0.0))[1]

    def recomputed_split(self, mode: str) -> tuple[float, float, float]:
        """Return the bytes by which the saved bytes grow in a split backward pass; see `recompute_split`."""
        return self.recompute_split.get(mode, (0.0, 0.0, 0.0))


class StepTrace(Spec):
    """The trace of one training step of a module with a loss, as created by `Model.from_module(..., memory=True)`."""

    units: tuple[str, ...]
    """Names of the units in execution order; the first is unit 0, the module around them."""
    parameters: tuple[ParameterRow, ...]
    """All parameters, in the module's order; a shared parameter counts once."""
    buffer_bytes: NonNegativeFloat
    output_bytes: NonNegativeFloat
    """Bytes of the module's output, for one sample."""
    num_outputs: Total = 1
    """Elements of the module's output, for one sample."""
    buffer_sizes: tuple[Total, ...] = ()
    """Bytes of each buffer, in the module's order."""
    gradient_order: tuple[Total, ...] = ()
    """Indices of the trained parameters, in the order in which the backward pass completes their gradients."""
    pieces: tuple[PipelinePiece, ...] = ()
    """Layers between which a pipeline can split the module, in execution order; empty if it cannot be split."""
    moments: dict[str, tuple[Moment, ...]]
    """Moments by recomputation mode: ``none``, ``selective``, ``full``."""
    layer_moments: dict[str, tuple[Moment, ...]] = Field(default_factory=dict)
    """Moments of a step in which each of `pieces` is a unit, from 1 on; empty if those in `moments` separate them."""
    flowing_moments: dict[str, tuple[Moment, ...]] = Field(default_factory=dict)
    """The same if the first of them, which has no trained parameters, has an output that requires a gradient, as the
    input of a stage does; empty if it has trained parameters."""
    saved_bytes: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Peak bytes saved for the backward pass, for one sample, by recomputation mode. Empty if the loss was not traced;
    `moments` then describes a step without the loss."""
    loss_bytes: NonNegativeFloat = 0.0
    """Part of `saved_bytes` that the loss saves without recomputation, for one sample."""
    messages: dict[str, tuple[AxisMessage, ...]] = Field(default_factory=dict)
    """Collectives of the tensor, context and expert axes in one micro-batch, in the order of their calls, by
    recomputation mode; empty unless the model or its sequences are divided."""
    num_operations: Total = 0
    """Number of operations in the step, not counting views."""
    moved_bytes: NonNegativeFloat = 0.0
    """Bytes that operations other than matrix products read and write, for one sample."""
    forward_operations: Total = 0
    """Part of `num_operations` in the forward pass and the loss."""
    forward_bytes: NonNegativeFloat = 0.0
    """Part of `moved_bytes` in the forward pass and the loss, for one sample."""
    product_elements: NonNegativeFloat = 0.0
    """Elements of the operands and results of matrix products and convolutions in the forward pass, for one sample."""
    weight_elements: NonNegativeFloat = 0.0
    """Elements of operands of matrix products and convolutions that do not grow with the batch."""
    largest_bytes: NonNegativeFloat = 0.0
    """Bytes of the largest tensor that the step allocates, without gradients of parameters, for one sample."""

    @property
    def running(self) -> set[int]:
        """Indices of the units that the forward pass runs, including unit 0; all units if no moments are known."""
        moments = self.moments.get("none", ())
        return {0, *(moment.unit for moment in moments)} if moments else {*range(len(self.units))}

    @property
    def first_trained(self) -> int:
        """Index in `pieces` of the first layer with a trained parameter; up to it, inputs require no gradient."""
        trained = (
            any(self.parameters[index].is_trained for index in piece.parameters) for piece in self.pieces
        )
        return next((place for place, is_trained in enumerate(trained) if is_trained), len(self.pieces))

    def pieces_of_units(self, mode: str) -> list[int] | None:
        """Return the index in `pieces` of each unit's layer, 0 for unit 0; None if moments do not separate the layers.

        They do if the first layer has trained parameters, each layer consists of whole units, and only the first and
        the last, such as those of a transformer, have parameters of unit 0.
        """
        leaves = {row.unit for row in self.moments.get(mode, ()) if row.phase == "leave"}
        found, last = [0], len(self.pieces) - 1
        for place, piece in enumerate(self.pieces):
            units = sorted({self.parameters[index].unit for index in piece.parameters})
            own = [unit for unit in units if unit]
            is_whole = own == [*range(len(found), len(found) + len(own))] and leaves.issuperset(own)
            if not is_whole or (place and not units) or (own != units and 0 < place < last):
                return None
            found += [place] * len(own)
        return found if len(found) == len(self.units) and self.first_trained == 0 else None

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
