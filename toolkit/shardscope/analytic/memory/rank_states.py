"""What each rank holds of a model in a step, to the byte, as a run measures it: whole tensors, or shards of them.

A run adds up whole storages (`shardscope.training.memory`), and what counts is the most that a kind came to in a step.
So padding counts where it lies in the same storage, as under FSDP2; a parameter's own counter counts by the tensor; and
a parameter that is used twice counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.memory.held import Sharding, optimizer_bytes, updated_elements, weight_bytes
from shardscope.spec.model.step import ParameterRow, StepTrace
from shardscope.spec.optimizer import OptimizerStates

Ints = npt.NDArray[np.int64]


class RankStates(NamedTuple):
    """Bytes that each rank holds at most in one step; int64 arrays of shape `(W,)`, by rank."""

    parameters: Ints
    """Its own, or its shards of them, and the model's buffers."""
    gradients: Ints
    """Where they are views of the buckets that are sent, the buckets."""
    optimizer: Ints
    """What the optimizer carries from step to step, counters included; as if no update had been skipped so far."""
    is_exact: bool = True
    """Whether a run holds just that; else something that is not known beforehand decides, and this is an estimate."""

    def repeated(self, groups: int) -> RankStates:
        """The same in each of several groups of ranks, one group after another."""
        parameters, gradients, optimizer = (np.tile(kind, groups) for kind in self[:3])
        return self._replace(parameters=parameters, gradients=gradients, optimizer=optimizer)


def spread_states(step: StepTrace, kept: OptimizerStates, sharding: Sharding) -> RankStates:
    """Of all `sharding.ranks` ranks: whole replicas, or the shards of a stage of ZeRO.

    Args:
        step: Of the model.
        kept: What its optimizer keeps.
        sharding: How it is spread; the rank in it does not matter.
    """
    trained = [row for row in step.parameters if row.is_trained]
    parameters, gradients = weight_bytes(step, trained, sharding)
    elements = updated_elements(trained, sharding)
    optimizer = optimizer_bytes(kept, elements, len(trained), sharding.element_bytes)
    every = np.ones(sharding.ranks, dtype=np.int64)
    return RankStates(
        every * int(parameters + step.buffer_bytes), every * int(gradients), optimizer.astype(np.int64)
    )


def placed_states(
    placed: Sequence[Sequence[ParameterRow]], kept: OptimizerStates, element_bytes: int
) -> RankStates:
    """Of ranks that each hold some of the tensors, whole, and all that goes with them.

    Args:
        placed: The tensors on each rank.
        kept: What the optimizer keeps.
        element_bytes: Of one weight, and of its gradient and moments.
    """
    trained = [[row for row in rows if row.is_trained] for rows in placed]
    weights, grads = (element_bytes * _elements(part) for part in (placed, trained))
    counts = np.array([len(rows) for rows in trained])
    optimizer = optimizer_bytes(kept, _elements(trained), counts, element_bytes)
    return RankStates(weights, grads, optimizer.astype(np.int64))


def _elements(placed: Sequence[Sequence[ParameterRow]]) -> Ints:
    return np.array([sum(row.num_elements for row in rows) for rows in placed], dtype=np.int64)
