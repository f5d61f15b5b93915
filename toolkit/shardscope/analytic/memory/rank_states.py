"""What each rank holds of a model in a step, to the byte, as a run measures it: whole tensors, or shards of them.

A run adds up whole storages (`shardscope.training.memory`), and what counts is the most that a kind came to in a step.
So padding counts where it lies in the same storage, as under FSDP2; a parameter's own counter counts by the tensor; and
a parameter that is used twice counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.held import Sharding, optimizer_bytes, updated_elements, weight_bytes
from shardscope.spec.model.step import ParameterRow

Ints = npt.NDArray[np.int64]


class RankStates(NamedTuple):
    """Bytes that each rank holds at most in one step; int64 arrays of shape `(W,)`, by rank."""

    parameters: Ints
    """Its own, or its shards of them, and the model's buffers."""
    gradients: Ints
    """Where they are views of the buckets that are sent, the buckets."""
    optimizer: Ints
    """What the optimizer carries from step to step, counters included; as if no update had been skipped so far."""
    buffers: Ints | None = None
    """What is kept to work in: room to receive in, updates that wait, a server's messages, what compression remembers.
    None where nobody has said: on GPUs, with compression that adapts, and for methods of a user's own."""
    is_exact: bool = True
    """Whether a run holds just that. Else something that is not known beforehand decides, or the optimizer keeps sums
    of rows and columns or treats some tensors apart, which is not in it."""

    def repeated(self, groups: int) -> RankStates:
        """The same in each of several groups of ranks, one group after another."""
        parameters, gradients, optimizer = (np.tile(kind, groups) for kind in self[:3])
        buffers = None if self.buffers is None else np.tile(self.buffers, groups)
        return self._replace(parameters=parameters, gradients=gradients, optimizer=optimizer, buffers=buffers)

    def working_in(self, step: JobStep, room: Callable[[], int | Ints | None]) -> RankStates:
        """With what `room` gives as buffers of each rank, or of all alike, where that is known in a step."""
        found = room() if step.backend == "gloo" else None
        if found is None:
            return self
        return self._replace(buffers=np.zeros_like(self.parameters) + np.asarray(found, dtype=np.int64))


def spread_states(
    step: JobStep,
    stage: int = 0,
    *,
    ranks: int | None = None,
    bucket_mb: float = 1.0,
    is_padded: bool = False,
) -> RankStates:
    """Of ranks that hold the whole model, or shards of it.

    Args:
        step: Of a job.
        stage: The stage of ZeRO whose shards they are; 0 for whole replicas.
        ranks: That hold it together; None for all.
        bucket_mb: Size of a flat bucket in MiB, under stage 1.
        is_padded: Whether stage 1 pads its buckets to equal shares.
    """
    cut = Sharding(stage, ranks or step.world_size, 0, bucket_mb, step.element_bytes, is_padded)
    trained = [row for row in step.rows if row.is_trained]
    optimizer = optimizer_bytes(step.kept, updated_elements(trained, cut), len(trained), cut.element_bytes)
    parameters, gradients = weight_bytes(step.rows, cut)
    every = np.ones(cut.ranks, dtype=np.int64)
    whole = every * (parameters + int(step.trace.buffer_bytes))
    return RankStates(whole, every * gradients, optimizer.astype(np.int64), is_exact=_goes_by_element(step))


def placed_states(step: JobStep, placed: Sequence[Sequence[ParameterRow]]) -> RankStates:
    """Of ranks that each hold some of the tensors, whole, and all that goes with them.

    Args:
        step: Of a job.
        placed: The tensors on each rank, out of `step.rows`.
    """
    trained = [[row for row in rows if row.is_trained] for rows in placed]
    weights, grads = (step.element_bytes * _elements(part) for part in (placed, trained))
    counts = np.array([len(rows) for rows in trained])
    optimizer = optimizer_bytes(step.kept, _elements(trained), counts, step.element_bytes)
    return RankStates(weights, grads, optimizer.astype(np.int64), is_exact=_goes_by_element(step))


def _goes_by_element(step: JobStep) -> bool:
    """Whether what the optimizer keeps follows from the numbers of elements and of tensors."""
    return not (step.kept.per_factor or step.kept.outside_hidden)


def _elements(placed: Sequence[Sequence[ParameterRow]]) -> Ints:
    return np.array([sum(row.num_elements for row in rows) for rows in placed], dtype=np.int64)
