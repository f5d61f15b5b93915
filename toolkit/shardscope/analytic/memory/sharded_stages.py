"""Parameters and gradients of a pipeline stage, whole or sharded with ZeRO 2 or 3.

Each layer of a stage is a unit of FSDP2. It reduces a stage's gradients after each backward pass, unit by unit, so a
rank has the whole gradients of a stage only during the pass, and shards afterwards. With ZeRO 3, it frees a unit's
parameters after the unit's forward pass, and those of a stage after its backward pass; with ZeRO 2, after the stage's
last backward pass in a step. Unless ranks share buffers, parameters are copied from a message of the size of their
unit, and gradients into one. In both cases `torch._chunk_cat` first makes a padded copy of each gradient whose first
dimension is not divisible by the number of shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from shardscope.analytic.sharding import padded_elements
from shardscope.spec.model.step import Moment, ParameterRow, PipelinePiece, StepTrace

_FREES = 3
"""ZeRO stage that frees parameters after each pass."""
_SEVERAL = -1
"""Unit of the parameters that several layers of a stage use."""


class Alive(NamedTuple):
    """Bytes of a stage that are in memory at one moment."""

    activations: float = 0.0
    """Activations and, with ZeRO 2 and 3, gathered parameters."""
    gradients: float = 0.0


class ShardedStages(NamedTuple):
    """How ZeRO 2 or 3 shards the stages of a pipeline."""

    stage: int
    """ZeRO stage, 2 or 3."""
    ranks: int
    """Number of ranks over which a stage is sharded."""
    expert_ranks: int | None = None
    """Number of ranks over which experts are sharded, if it is another one."""
    shares_buffers: bool = False
    """Whether ranks exchange units in buffers that they share, and not in messages."""

    def ranks_of(self, row: ParameterRow) -> int:
        """Return the number of ranks over which a parameter is sharded."""
        if row.is_whole:
            return 1
        return self.ranks if self.expert_ranks is None or not row.is_expert else self.expert_ranks


class StageStates(NamedTuple):
    """Bytes of a stage's parameters and gradients."""

    sharded: ShardedStages | None
    units: Mapping[int, float]
    """Parameters of each layer of the stage that are gathered, with their padding; those of several layers at -1. Empty
    unless the stage is sharded."""
    reduced: Mapping[int, float]
    """Gradients that are reduced, in the same way."""
    copied: Mapping[int, float]
    """The part of `reduced` of which padded copies are made, in the same way."""
    unreduced: Mapping[int, float]
    """Gradients before they are reduced, in the same way."""
    kept: Mapping[int, float]
    """Shards that their reduction leaves, in the same way."""
    gradients: float
    """Gradients, without `whole`."""
    shards: float
    """What a backward pass leaves of `gradients`: all of them or, with ZeRO 2 and 3, shards."""
    whole: Mapping[int, float]
    """Gradients that several stages of the rank share or, with ZeRO 2 and 3, that are not reduced, by parameter."""
    whole_around: float
    """Part of `whole` that belongs to unit 0."""

    @property
    def gathered(self) -> float:
        """Bytes of all parameters that are gathered."""
        return sum(self.units.values())

    @property
    def frees(self) -> bool:
        """Whether parameters are freed after each pass."""
        return self.sharded is not None and self.sharded.stage == _FREES

    @property
    def sends(self) -> bool:
        """Whether parameters and gradients are exchanged in messages."""
        return self.sharded is not None and not self.sharded.shares_buffers

    def gathered_at(self, row: Moment, layer: int) -> float:
        """Return the bytes of parameters that are gathered at a moment of a pass, if they are freed after it.

        This includes the message from which those of a layer are copied.

        Args:
            row: The moment.
            layer: Which of the stage's layers runs.
        """
        if not self.frees:
            return 0.0
        own, now = self.units.get(layer, 0.0), self.units.get(_SEVERAL, 0.0)
        if row.phase in ("enter", "turn") and row.unit and self.sends:
            now += own
        if row.phase in ("enter", "forward"):
            return now + own
        return now + sum(size for unit, size in self.units.items() if unit >= layer)

    def reduction(self, *, has_gradients: bool, frees: bool) -> Alive:
        """Return the peak of the reduction after a backward pass; nothing if it allocates nothing.

        Args:
            has_gradients: Whether an earlier pass has left shards, which are not part of the peak and to which the new
                ones are added.
            frees: Whether each unit's parameters are freed before its reduction; those of later units count.
        """
        if self.sharded is None:
            return Alive()
        gathered, gradients, peak = self.gathered, self.gradients, Alive()
        for unit in sorted(self.units):
            gathered -= self.units[unit]
            work = self.reduced[unit] * self.sends + self.copied[unit]
            if work:
                peak = max(peak, Alive(gathered * frees, gradients + work), key=sum)
            gradients -= self.unreduced[unit] - self.kept[unit] * (not has_gradients)
        return peak


def states_of(
    trace: StepTrace,
    pieces: Sequence[PipelinePiece],
    shared: Collection[int],
    sharded: ShardedStages | None,
    element_bytes: int,
) -> StageStates:
    """Return the states of a stage.

    Args:
        trace: Trace of the whole model.
        pieces: The layers of the stage.
        shared: Indices of the parameters that other stages of the rank have too.
        sharded: How stages are sharded; None if they are whole.
        element_bytes: Bytes of one element.
    """
    units, reduced, copied, unreduced, kept, whole = (dict[int, float]() for _ in range(6))
    gradients = shards = whole_around = 0.0
    users: dict[int, list[int]] = {}
    for layer, piece in enumerate(pieces):
        for place in piece.parameters:
            users.setdefault(place, []).append(layer)
    for place, layers in users.items():
        row, unit = trace.parameters[place], layers[0] if len(layers) == 1 else _SEVERAL
        ranks = 1 if sharded is None else sharded.ranks_of(row)
        gradient = float(element_bytes * row.num_elements * row.is_trained)
        if place in shared or (sharded is not None and ranks == 1):
            whole[place] = gradient
            whole_around += gradient * (not row.unit)
            continue
        gradients += gradient
        if ranks == 1:
            shards += gradient
            continue
        size = float(element_bytes * padded_elements(row.shape, ranks))
        units[unit] = units.get(unit, 0.0) + size
        padded = size * row.is_trained
        reduced[unit] = reduced.get(unit, 0.0) + padded
        copied[unit] = copied.get(unit, 0.0) + padded * (row.shape[0] % ranks > 0)
        unreduced[unit] = unreduced.get(unit, 0.0) + gradient
        kept[unit] = kept.get(unit, 0.0) + padded / ranks
        shards += padded / ranks
    return StageStates(
        sharded, units, reduced, copied, unreduced, kept, gradients, shards, whole, whole_around
    )
