"""Bytes that a rank holds for a module throughout a step: parameters or shards, optimizer state, and work buffers.

Sharding follows `shardscope.training.strategies`. Stage 1 splits flat buckets element by element and keeps whole
parameters and gradients. Stages 2 and 3 are FSDP2's, which splits each tensor along its first dimension and keeps
padded shards of parameters and gradients. Shardscope's layer-wise optimizers keep a buffer for updates that wait for
the norms of their tensors: all updates of a rank if norms are summed over ranks, else a batch of tensors that fits the
cache. The ring posts receives for two slices of a chunk ahead, into buffers that it keeps.

`RankStates` holds the exact bytes of every rank in a step, as a run measures them. A run adds up whole storages
(`shardscope.training.memory`), and reports the maximum of each kind in a step. So padding counts if it is in the same
storage, as under FSDP2; step counters count once per tensor; and a parameter that is used twice counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.fully_sharded import units_of
from shardscope.analytic.sharding import (
    bucket_elements,
    flat_piece_elements,
    flat_shard_elements,
    padded_elements,
    row_shard_elements,
)
from shardscope.errors import SpecError
from shardscope.spec.layout_optimizer import AnyStates, states_of
from shardscope.spec.model.step import ParameterRow, StepTrace
from shardscope.spec.model.table import LayerTable
from shardscope.spec.optimizer import OptimizerStates

Ints = npt.NDArray[np.int64]
CACHE_ELEMENTS = 1 << 21
"""Maximum number of elements in a batch of tensors; a larger tensor is a batch by itself."""
MIB = 2**20
RECEIVED_AHEAD = 2
"""Number of receives that a ring posts ahead."""
Sums = Sequence[tuple[int, int]]
"""For each tensor that is summed or gathered, its number of elements and the bytes of one element."""
ELEMENT_BYTES = 4
"""Bytes of a parameter in float32."""


class Sharding(NamedTuple):
    """How a step is distributed over devices."""

    stage: int
    ranks: int
    rank: int
    bucket_mb: float
    element_bytes: int = ELEMENT_BYTES
    """Bytes of one weight, of one gradient element and of one optimizer moment."""
    is_padded: bool = False
    """Whether stage 1 pads its buckets to equal shares, as packets and the backends' collectives require."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether full gradients are kept in buckets that persist from step to step."""
        return self.stage == 1 or (self.stage == 0 and self.ranks > 1)


class HeldBytes(NamedTuple):
    """Bytes on one rank."""

    parameters: float
    gradients: float
    """Bytes of the gradients after all have been computed."""
    optimizer: float
    work: float
    """Bytes of work buffers of the optimizer and of the ring."""
    buffers: float
    """Bytes of the module's own buffers."""


def held_of(table: LayerTable, optimizer: AnyStates, sharding: Sharding) -> HeldBytes:
    """Bytes that a rank holds throughout a step for the module described by `table`.

    Raises:
        SpecError: The optimizer is unknown, or shards are requested of a table that was not traced.
    """
    kept = states_of(optimizer)
    step = table.step
    if step is None:
        if sharding.stage:
            raise not_traced(f"zero_stage={sharding.stage}")
        step = _untraced(table)
    trained = [row for row in step.parameters if row.is_trained]
    num_elements = int(updated_elements(trained, sharding)[sharding.rank])
    update = num_elements if sharding.stage else largest_batch([row.num_elements for row in trained])
    width = sharding.element_bytes
    work = width * update * kept.buffers_updates + _ring_bytes(step, trained, sharding)
    parameters, gradients = weight_bytes(step.parameters, sharding)
    states = optimizer_bytes(kept, num_elements, max(len(trained), table.num_tensors), width)
    return HeldBytes(parameters, gradients, float(states), work, step.buffer_bytes)


def optimizer_bytes(
    kept: OptimizerStates,
    num_elements: npt.ArrayLike,
    num_tensors: npt.ArrayLike,
    element_bytes: int = ELEMENT_BYTES,
) -> npt.NDArray[np.float64]:
    """Bytes of optimizer state for the given numbers of elements and of (whole or partial) tensors.

    Arguments follow NumPy broadcasting.
    """
    moments = kept.bytes_per_param(element_bytes) * np.asarray(num_elements)
    return np.asarray(moments + kept.counter_bytes * np.asarray(num_tensors), dtype=np.float64)


def _untraced(table: LayerTable) -> StepTrace:
    """Build a stand-in for a traced step, in which each layer is one parameter tensor."""
    rows = tuple(ParameterRow(unit=0, shape=(layer.num_params,)) for layer in table.layers)
    return StepTrace(units=("",), parameters=rows, buffer_bytes=0, output_bytes=0, moments={})


def not_traced(field: str) -> SpecError:
    """Return the error for a table without a traced step if `field` needs one."""
    return SpecError(
        f"{field} needs a traced step, which this table lacks; describe the module with "
        "Model.from_module(module, example, memory=True)"
    )


def updated_elements(
    trained: Sequence[ParameterRow], sharding: Sharding, *, only: frozenset[int] | None = None
) -> Ints:
    """Elements that each rank updates; shape `(N,)`, by rank.

    Args:
        trained: Trained parameters, in the module's order.
        sharding: How they are distributed.
        only: Indices of the parameters to count; None for all.
    """
    if only is not None and len(only) < len(trained):
        if sharding.stage == 1:
            sizes, capacity = [row.num_elements for row in trained], _capacity(sharding)
            pieces = flat_piece_elements(sizes, capacity, sharding.ranks, is_padded=sharding.is_padded)
            return np.asarray(pieces[sorted(only)].sum(axis=0))
        trained = [trained[place] for place in sorted(only)]
    if sharding.stage == 0:
        return np.full(sharding.ranks, sum(row.num_elements for row in trained))
    if sharding.stage == 1:
        buckets = _buckets(trained, sharding)
        return flat_shard_elements(buckets, sharding.ranks, is_padded=sharding.is_padded)
    return row_shard_elements([row.shape for row in trained], sharding.ranks)


def weight_bytes(rows: Sequence[ParameterRow], sharding: Sharding) -> tuple[int, int]:
    """Bytes of a rank's parameters and of its gradients, including padding; the same on all ranks."""
    trained = [row for row in rows if row.is_trained]
    padding = sum(-size % sharding.ranks for size in _buckets(trained, sharding)) if sharding.is_padded else 0
    whole, grads = (_elements(part, sharding) + padding for part in (rows, trained))
    return sharding.element_bytes * whole, sharding.element_bytes * grads


def _elements(rows: Sequence[ParameterRow], sharding: Sharding) -> int:
    """Number of elements of whole tensors, or of a rank's shards of these tensors with padding."""
    if sharding.stage < 2:
        return sum(row.num_elements for row in rows)
    return sum(padded_elements(row.shape, sharding.ranks) for row in rows) // sharding.ranks


def _buckets(trained: Sequence[ParameterRow], sharding: Sharding) -> list[int]:
    return bucket_elements([row.num_elements for row in trained], _capacity(sharding))


def _capacity(sharding: Sharding) -> int:
    """Capacity of a flat bucket, in elements."""
    return int(sharding.bucket_mb * 2**20) // sharding.element_bytes


def largest_batch(sizes: Sequence[int]) -> int:
    """Elements in the largest batch of consecutive tensors, as `LayerwiseOptimizer` packs them to fit in the cache."""
    batches = [0]
    for size in sizes:
        if batches[-1] and batches[-1] + size > CACHE_ELEMENTS:
            batches.append(0)
        batches[-1] += size
    return max(batches)


def _ring_bytes(step: StepTrace, trained: Sequence[ParameterRow], sharding: Sharding) -> int:
    """Bytes of the ring's receive buffers for its longest message, a slice of a chunk of a bucket or unit."""
    if sharding.stage == 0:
        return 0
    width = sharding.element_bytes
    if sharding.stage == 1:
        lengths = _buckets(trained, sharding)
    else:
        lengths = [int(size) // width for size in units_of(step, sharding.ranks, width).gathered]
    return ring_room([(length, width) for length in lengths], sharding.ranks)


def ring_room(sums: Sums, members: int, *, directions: int = 1, slice_mb: float = 4.0) -> int:
    """Bytes of a ring's receive buffers on a rank, after the ring has summed or gathered these tensors.

    Args:
        sums: The tensors.
        members: Number of ranks in the ring.
        directions: 2 if half of each tensor is sent the other way around, else 1.
        slice_mb: Maximum size of a message in MiB.
    """

    def room(size: int, width: int) -> int:
        halves = [size] if directions == 1 else [(size + 1) // 2, size // 2]
        chunks = [-(-half // members) for half in halves]
        num_slices = max(1, -(-chunks[0] * width // int(slice_mb * MIB)))
        return sum(RECEIVED_AHEAD * slice_bytes(chunk, width, num_slices) for chunk in chunks)

    return max((room(*each) for each in sums), default=0)


def slice_bytes(num_elements: int, element_bytes: int, num_slices: int) -> int:
    """Bytes of the longest slice."""
    return -(-num_elements // num_slices) * element_bytes


def check_sharding(sharding: Sharding) -> None:
    """Raise a `SpecError` for an invalid sharding."""
    if sharding.stage not in (0, 1, 2, 3):
        raise SpecError(f"zero_stage={sharding.stage!r} is not a ZeRO stage; use 0, 1, 2 or 3")
    least = 2 if sharding.stage else 1
    if sharding.ranks < least:
        raise SpecError(
            f"data_parallel={sharding.ranks} devices are too few for zero_stage={sharding.stage}; use at least {least}"
        )
    if not 0 <= sharding.rank < sharding.ranks:
        raise SpecError(
            f"rank={sharding.rank} is not one of the {sharding.ranks} devices; use 0 to {sharding.ranks - 1}"
        )
    if not sharding.bucket_mb > 0:
        raise SpecError(f"bucket_mb={sharding.bucket_mb} is not a bucket size; give more than 0")


class RankStates(NamedTuple):
    """Maximum bytes that each rank holds in one step; int64 arrays of shape `(W,)`, by rank."""

    parameters: Ints
    """Bytes of the rank's parameters, or of its shards of them, and of the model's buffers."""
    gradients: Ints
    """Bytes of the gradients; if these are views of communication buckets, bytes of the buckets."""
    optimizer: Ints
    """Bytes of optimizer state kept from step to step, including step counters, if no update has been skipped."""
    buffers: Ints | None = None
    """Bytes of work buffers: receive buffers, waiting updates, a server's messages, residuals and other state of
    compression. None if unknown: on GPUs, with adaptive compression, and for user-defined methods."""
    is_exact: bool = True
    """Whether a run holds exactly these bytes. If not, they depend on something not known in advance, or the optimizer
    keeps row and column sums or treats some tensors separately, which is not counted."""

    def repeated(self, groups: int) -> RankStates:
        """Repeat the states for several groups of ranks, one group after another."""
        parameters, gradients, optimizer = (np.tile(kind, groups) for kind in self[:3])
        buffers = None if self.buffers is None else np.tile(self.buffers, groups)
        return self._replace(parameters=parameters, gradients=gradients, optimizer=optimizer, buffers=buffers)

    def working_in(self, step: JobStep, room: Callable[[], int | Ints | None]) -> RankStates:
        """Return a copy with the result of `room`, by rank or one for all, as work buffers; unchanged if unknown."""
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
    """Return the states of ranks that hold the whole model, or shards of it.

    Args:
        step: A step of a job.
        stage: ZeRO stage; 0 for whole replicas.
        ranks: Number of ranks that share one copy of the model; None for all.
        bucket_mb: Size of a flat bucket in MiB, in stage 1.
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
    """Return the states of ranks that each hold some whole tensors, with their gradients and optimizer state.

    Args:
        step: A step of a job.
        placed: Parameters on each rank, from `step.rows`.
    """
    trained = [[row for row in rows if row.is_trained] for rows in placed]
    weights, grads = (step.element_bytes * _elements_placed(part) for part in (placed, trained))
    counts = np.array([len(rows) for rows in trained])
    optimizer = optimizer_bytes(step.kept, _elements_placed(trained), counts, step.element_bytes)
    return RankStates(weights, grads, optimizer.astype(np.int64), is_exact=_goes_by_element(step))


def _goes_by_element(step: JobStep) -> bool:
    """Whether the size of the optimizer state follows from the numbers of elements and tensors alone."""
    return not (step.kept.per_factor or step.kept.outside_hidden)


def _elements_placed(placed: Sequence[Sequence[ParameterRow]]) -> Ints:
    return np.array([sum(row.num_elements for row in rows) for rows in placed], dtype=np.int64)
