"""Bytes that a rank holds for a module throughout a step: parameters, gradients, optimizer state, and work buffers.

Parameters are sharded as in `shardscope.training.strategies`. ZeRO-1 divides flat buckets evenly, and keeps
whole parameters and gradients on every rank. ZeRO-2 and ZeRO-3 are implemented by FSDP2, which splits each
tensor along its first dimension and keeps padded shards of parameters and gradients. Shardscope's layer-wise
optimizers buffer updates until the norms of their tensors are known: all updates of a rank if norms are
summed over ranks, else one batch of tensors that fits in the cache. The ring posts receives for two slices in
advance, into buffers that it keeps.

`RankStates` contains the exact bytes of every rank in a step, as a run measures them: a run sums whole storages
(`shardscope.training.memory`), and reports the maximum of each type of memory in a step. Therefore padding counts if it
is in the same storage, as in FSDP2; step counters count once per tensor; and a shared parameter counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import Shares, chunk_sizes
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
"""Maximum number of elements in a batch of tensors, unless the batch is a single larger tensor."""
MIB = 2**20
RECEIVED_AHEAD = 2
"""Number of receives that a ring posts in advance."""
Sums = Sequence[tuple[int, int]]
"""Number of elements and bytes per element, for each tensor that a collective reduces or gathers."""
ELEMENT_BYTES = 4
"""Bytes of a parameter in float32."""


class Sharding(NamedTuple):
    """How a model is sharded over ranks."""

    stage: int
    """ZeRO stage, 0 to 3."""
    ranks: int
    """Number of ranks that replicate or shard the model."""
    rank: int
    bucket_mb: float
    """Size of a flat bucket in MiB, in stage 1."""
    element_bytes: int = ELEMENT_BYTES
    """Bytes of one element of a weight, a gradient or an optimizer moment."""
    is_padded: bool = False
    """Whether stage 1 pads its buckets so that all ranks get equal shards, as compression and backends require."""
    shares: Shares = None
    """Relative sizes of the ranks' shards, in stage 1; None for equal shards."""
    expert_ranks: int | None = None
    """Number of ranks over which experts are sharded, in stages 2 and 3, if it is another one."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether full gradients are in buckets that stay allocated from step to step."""
        return keeps_gradients(self.stage, self.ranks)


def keeps_gradients(stage: int | None, ranks: int) -> bool:
    """Return whether gradients are in buckets that stay allocated; `stage` is a ZeRO stage, or None."""
    return stage == 1 or (stage == 0 and ranks > 1)


class HeldBytes(NamedTuple):
    """Bytes that one rank holds throughout a step."""

    parameters: float
    gradients: float
    """Bytes of all gradients at the end of the backward pass."""
    optimizer: float
    work: float
    """Bytes of the work buffers of the optimizer and the ring."""
    buffers: float
    """Bytes of the module's buffers, such as running statistics."""


def held_of(table: LayerTable, optimizer: AnyStates, sharding: Sharding) -> HeldBytes:
    """Return the bytes that a rank holds throughout a step, for the module described by `table`.

    Raises:
        SpecError: The optimizer is unknown, or the ZeRO stage is above 0 and the table has no traced step.
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
    """Return the bytes of optimizer state, including step counters.

    Args:
        kept: Size of the optimizer state per element and per tensor.
        num_elements: Number of elements that a rank updates; a number or an array.
        num_tensors: Number of tensors that these elements belong to, even if only in part; a number or an array.
        element_bytes: Bytes of one state element, unless `kept` sets it.
    """
    moments = kept.bytes_per_param(element_bytes) * np.asarray(num_elements)
    return np.asarray(moments + kept.counter_bytes * np.asarray(num_tensors), dtype=np.float64)


def _untraced(table: LayerTable) -> StepTrace:
    """Build a substitute for a traced step, in which each layer has one parameter tensor and nothing else."""
    rows = tuple(ParameterRow(unit=0, shape=(layer.num_params,)) for layer in table.layers)
    return StepTrace(units=("",), parameters=rows, buffer_bytes=0, output_bytes=0, moments={})


def not_traced(field: str) -> SpecError:
    """Return the error to raise if `field` needs a traced step, but the table has none."""
    return SpecError(
        f"{field} needs a traced step, which this table lacks; describe the module with "
        "Model.from_module(module, example, memory=True)"
    )


def updated_elements(
    trained: Sequence[ParameterRow], sharding: Sharding, *, only: frozenset[int] | None = None
) -> Ints:
    """Return the number of elements that each rank updates; shape `(N,)`, by rank.

    Args:
        trained: Trained parameters, in the module's order.
        sharding: How they are sharded.
        only: Indices of the parameters to count; None for all.
    """
    if only is not None and len(only) < len(trained):
        if sharding.stage == 1:
            sizes, capacity = [row.num_elements for row in trained], _capacity(sharding)
            pieces = flat_piece_elements(
                sizes, capacity, sharding.ranks, is_padded=sharding.is_padded, shares=sharding.shares
            )
            return np.asarray(pieces[sorted(only)].sum(axis=0))
        trained = [trained[place] for place in sorted(only)]
    if sharding.stage == 0:
        return np.full(sharding.ranks, sum(row.num_elements for row in trained))
    if sharding.stage == 1:
        buckets = _buckets(trained, sharding)
        return flat_shard_elements(
            buckets, sharding.ranks, is_padded=sharding.is_padded, shares=sharding.shares
        )
    cut = row_shard_elements([row.shape for row in trained if not row.is_whole], sharding.ranks)
    return cut + sum(row.num_elements for row in trained if row.is_whole)


def weight_bytes(rows: Sequence[ParameterRow], sharding: Sharding) -> tuple[int, int]:
    """Return the bytes of a rank's parameters and of its gradients, including padding; they are equal on all ranks."""
    trained = [row for row in rows if row.is_trained]
    padding = sum(-size % sharding.ranks for size in _buckets(trained, sharding)) if sharding.is_padded else 0
    whole, grads = (_elements(part, sharding) + padding for part in (rows, trained))
    return sharding.element_bytes * whole, sharding.element_bytes * grads


def _elements(rows: Sequence[ParameterRow], sharding: Sharding) -> int:
    """Return the number of elements that a rank holds: those of whole tensors or, in stages 2 and 3, of padded
    shards.
    """
    if sharding.stage < 2:
        return sum(row.num_elements for row in rows)
    cut = sum(padded_elements(row.shape, sharding.ranks) for row in rows if not row.is_whole)
    return cut // sharding.ranks + sum(row.num_elements for row in rows if row.is_whole)


def _buckets(trained: Sequence[ParameterRow], sharding: Sharding) -> list[int]:
    return bucket_elements([row.num_elements for row in trained], _capacity(sharding))


def _capacity(sharding: Sharding) -> int:
    """Return the capacity of a flat bucket, in elements."""
    return int(sharding.bucket_mb * 2**20) // sharding.element_bytes


def largest_batch(sizes: Sequence[int]) -> int:
    """Return the number of elements in the largest of `LayerwiseOptimizer`'s batches.

    A batch consists of consecutive tensors that together fit in the cache, or of one larger tensor.
    """
    batches = [0]
    for size in sizes:
        if batches[-1] and batches[-1] + size > CACHE_ELEMENTS:
            batches.append(0)
        batches[-1] += size
    return max(batches)


def _ring_bytes(step: StepTrace, trained: Sequence[ParameterRow], sharding: Sharding) -> int:
    """Return the bytes of the ring's receive buffers after it has sent all flat buckets or FSDP units."""
    if sharding.stage == 0:
        return 0
    width = sharding.element_bytes
    if sharding.stage == 1:
        lengths = _buckets(trained, sharding)
    else:
        lengths = [int(size) // width for size in units_of(step, sharding.ranks, width).gathered]
    return ring_buffer_bytes([(length, width) for length in lengths], sharding.ranks, shares=sharding.shares)


def ring_buffer_bytes(
    sums: Sums, members: int, *, directions: int = 1, slice_mb: float = 4.0, shares: Shares = None
) -> int:
    """Return the bytes of a rank's receive buffers, after the ring has reduced or gathered the given tensors.

    Args:
        sums: Sizes of the tensors.
        members: Number of ranks in the ring.
        directions: Number of directions in which the ring sends, 1 or 2.
        slice_mb: Maximum size of a message in MiB.
        shares: Relative sizes of the ranks' chunks; None for nearly equal chunks.
    """

    def buffer_bytes(size: int, width: int) -> int:
        halves = [size] if directions == 1 else [(size + 1) // 2, size // 2]
        chunks = [int(chunk_sizes(half, members, shares).max()) for half in halves]
        num_slices = max(1, -(-chunks[0] * width // int(slice_mb * MIB)))
        return sum(RECEIVED_AHEAD * slice_bytes(chunk, width, num_slices) for chunk in chunks)

    return max((buffer_bytes(*each) for each in sums), default=0)


def slice_bytes(num_elements: int, element_bytes: int, num_slices: int) -> int:
    """Return the bytes of the longest of `num_slices` nearly equal slices."""
    return -(-num_elements // num_slices) * element_bytes


def check_sharding(sharding: Sharding) -> None:
    """Check that a sharding is valid.

    Raises:
        SpecError: The stage, the number of ranks, the rank or the bucket size is out of range.
    """
    if sharding.stage not in (0, 1, 2, 3):
        raise SpecError(f"zero_stage={sharding.stage!r} is not a ZeRO stage; use 0, 1, 2 or 3")
    least = 2 if sharding.stage else 1
    if sharding.ranks < least:
        raise SpecError(
            f"data_parallel={sharding.ranks} is too few for zero_stage={sharding.stage}; use at least {least}"
        )
    if not 0 <= sharding.rank < sharding.ranks:
        raise SpecError(
            f"rank={sharding.rank} is out of range for {sharding.ranks} ranks; use 0 to {sharding.ranks - 1}"
        )
    if not sharding.bucket_mb > 0:
        raise SpecError(
            f"bucket_mb={sharding.bucket_mb} is not a valid bucket size; give a size above 0, in MiB"
        )


class RankStates(NamedTuple):
    """Maximum bytes that each rank holds in one step; int64 arrays of shape `(W,)`, by rank."""

    parameters: Ints
    """Bytes of the rank's parameters or parameter shards, and of the module's buffers."""
    gradients: Ints
    """Bytes of the gradients or, if these are views of communication buckets, of the buckets."""
    optimizer: Ints
    """Bytes of optimizer state kept from step to step, including step counters; assumes that no update was skipped."""
    buffers: Ints | None = None
    """Bytes of work buffers: receive buffers, buffered updates, a server's messages, and residuals and other state of
    compression. None if unknown, as on GPUs, with adaptive compression, and for user-defined methods."""
    is_exact: bool = True
    """Whether a run holds exactly these bytes. They are inexact if they depend on something not known in advance, and
    for optimizers that keep row and column sums or treat some tensors separately, because this state is not counted."""

    def repeated(self, groups: int) -> RankStates:
        """Return the states of several groups of ranks, one group after another, given those of one group."""
        return self.each(lambda kind: np.tile(kind, groups))

    def each(self, change: Callable[[Ints], Ints]) -> RankStates:
        """Return a copy with the function `change` applied to the bytes of each type of memory."""
        parameters, gradients, optimizer = map(change, self[:3])
        buffers = None if self.buffers is None else change(self.buffers)
        return self._replace(parameters=parameters, gradients=gradients, optimizer=optimizer, buffers=buffers)

    def with_work_buffers(self, step: JobStep, buffer_bytes: Callable[[], int | Ints | None]) -> RankStates:
        """Return a copy whose work buffers have the size that `buffer_bytes` returns: bytes, by rank or for all.

        The copy is unchanged if `buffer_bytes` returns None, or if the ranks compute on GPUs.
        """
        found = None if step.is_on_gpus else buffer_bytes()
        if found is None:
            return self
        return self._replace(buffers=np.zeros_like(self.parameters) + np.asarray(found, dtype=np.int64))


def states_side_by_side(blocks: Sequence[RankStates]) -> RankStates:
    """Return the states of several blocks of ranks, one after the other."""
    parameters, gradients, optimizer = (
        np.concatenate(rows) for rows in zip(*(each[:3] for each in blocks), strict=True)
    )
    buffers = [each.buffers for each in blocks if each.buffers is not None]
    every = np.concatenate(buffers) if len(buffers) == len(blocks) else None
    return RankStates(parameters, gradients, optimizer, every, all(each.is_exact for each in blocks))


def states_together(parts: Sequence[RankStates]) -> RankStates:
    """Return the states of ranks that hold several sets of parameters."""
    parameters, gradients, optimizer = (
        np.asarray(np.sum(rows, axis=0)) for rows in zip(*(each[:3] for each in parts), strict=True)
    )
    buffers = [each.buffers for each in parts if each.buffers is not None]
    every = np.asarray(np.sum(buffers, axis=0)) if len(buffers) == len(parts) else None
    return RankStates(parameters, gradients, optimizer, every, all(each.is_exact for each in parts))


def spread_states(
    step: JobStep,
    stage: int = 0,
    *,
    ranks: int | None = None,
    bucket_mb: float = 1.0,
    is_padded: bool = False,
    shares: Shares = None,
) -> RankStates:
    """Return the states of ranks that each hold a replica of the model or, with ZeRO, shards of it.

    Args:
        step: A step of a job.
        stage: ZeRO stage; 0 for replicas.
        ranks: Number of ranks over which one copy of the model is sharded; None for all.
        bucket_mb: Size of a flat bucket in MiB, in stage 1.
        is_padded: Whether stage 1 pads its buckets so that all ranks get equal shards.
        shares: Relative sizes of the ranks' shards, in stage 1; None for equal shards.
    """
    cut = Sharding(stage, ranks or step.world_size, 0, bucket_mb, step.element_bytes, is_padded, shares)
    trained = [row for row in step.rows if row.is_trained]
    optimizer = optimizer_bytes(step.kept, updated_elements(trained, cut), len(trained), cut.element_bytes)
    parameters, gradients = weight_bytes(step.rows, cut)
    every = np.ones(cut.ranks, dtype=np.int64)
    whole = every * (parameters + int(step.trace.buffer_bytes))
    return RankStates(
        whole, every * gradients, optimizer.astype(np.int64), is_exact=_scales_with_elements(step)
    )


def placed_states(step: JobStep, placed: Sequence[Sequence[ParameterRow]]) -> RankStates:
    """Return the states of ranks that each hold some of the model's tensors, unsharded.

    Args:
        step: A step of a job.
        placed: The parameters that each rank holds, from `step.rows`.
    """
    trained = [[row for row in rows if row.is_trained] for rows in placed]
    weights, grads = (step.element_bytes * _elements_placed(part) for part in (placed, trained))
    counts = np.array([len(rows) for rows in trained])
    optimizer = optimizer_bytes(step.kept, _elements_placed(trained), counts, step.element_bytes)
    return RankStates(weights, grads, optimizer.astype(np.int64), is_exact=_scales_with_elements(step))


def _scales_with_elements(step: JobStep) -> bool:
    """Return whether the size of the optimizer state depends only on the numbers of elements and tensors."""
    return not (step.kept.per_factor or step.kept.outside_hidden)


def _elements_placed(placed: Sequence[Sequence[ParameterRow]]) -> Ints:
    return np.array([sum(row.num_elements for row in rows) for rows in placed], dtype=np.int64)
