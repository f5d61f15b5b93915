"""Bytes that ranks hold with parameter servers: a copy of the model on every rank, and a shard on each server.

On a CPU, a server's tensors are stored contiguously within the message that workers pull, after its header. On a GPU,
they are stored separately, and the message is a work buffer in host memory. A server sums gradients in one tensor, or
two on a GPU; these count as gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardscope.analytic.communication.compressed import FLOAT_BYTES
from shardscope.analytic.communication.parameter_server import HEADER_BYTES
from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.held import Ints, RankStates, placed_states
from shardscope.analytic.memory.work_space import compression_state_bytes, updates_of
from shardscope.spec.model.step import ParameterRow

Shards = Sequence[Sequence[ParameterRow]]
"""The tensors of each server; servers are the lowest ranks."""


def server_states(
    step: JobStep, shards: Shards, *, dedicated: bool = False, pack: Callable[[int], int] | None = None
) -> RankStates:
    """Return the states that servers and workers hold in a step.

    Args:
        step: A step of a job.
        shards: The tensors of each server.
        dedicated: Whether the ranks of servers compute no gradients.
        pack: Function from a number of elements to the bytes of their packed gradient; None without compression.
    """
    elsewhere: list[list[ParameterRow]] = [[] for _ in range(step.world_size - len(shards))]
    own = placed_states(step, [*shards, *elsewhere])
    is_server = np.arange(step.world_size) < len(shards)
    is_on_host = not step.is_on_gpus
    copies, grads = _bytes(step.rows, step), _bytes(step.trained, step)
    works: Ints = np.where(is_server & dedicated, 0, grads)
    states = RankStates(
        parameters=copies + int(step.trace.buffer_bytes) + own.parameters + HEADER_BYTES * (is_server & is_on_host),
        gradients=works + own.gradients * (1 if is_on_host else 2),
        optimizer=own.optimizer,
        is_exact=own.is_exact,
    )  # fmt: skip
    return states.with_work_buffers(step, lambda: _buffer_bytes(step, shards, dedicated=dedicated, pack=pack))


def _buffer_bytes(
    step: JobStep, shards: Shards, *, dedicated: bool, pack: Callable[[int], int] | None
) -> Ints | None:
    """Return the bytes of each rank's work buffers: messages, float32 copies, updates, and compression state.

    A worker has a buffer for the message to each server, and for the reply of each server on another rank. A server has
    a buffer for the message of each worker on another rank. With compression, a worker copies gradients to float32
    before packing; a server whose elements are not float32 unpacks gradients into float32.

    Returns:
        Bytes by rank, or None if the size of the compression state is unknown.
    """
    counts = [sum(row.num_elements for row in rows) for rows in shards]
    pulled = [HEADER_BYTES + step.element_bytes * count for count in counts]
    pushed = pulled if pack is None else [HEADER_BYTES + pack(count) for count in counts]
    laid_out = [0 if pack is None else FLOAT_BYTES * count for count in counts]
    kept = compression_state_bytes(step, [[(count,)] for count in counts], scatters=True)
    if kept is None:
        return None
    first = len(shards) if dedicated else 0
    remote = step.world_size - first - (0 if dedicated else 1)
    buffers = np.zeros(step.world_size, dtype=np.int64)
    buffers[first:] += sum(pushed) + sum(pulled) + sum(laid_out) + kept
    for rank, rows in enumerate(shards):
        buffers[rank] += remote * pushed[rank] + updates_of(rows, step) - (0 if dedicated else pulled[rank])
        buffers[rank] += laid_out[rank] if step.element_bytes != FLOAT_BYTES else 0
    return buffers


def _bytes(rows: Sequence[ParameterRow], step: JobStep) -> int:
    return step.element_bytes * sum(row.num_elements for row in rows)
