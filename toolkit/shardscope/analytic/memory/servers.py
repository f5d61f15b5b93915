"""What ranks hold around a parameter server: every rank a copy of the model, and servers their shards of it besides.

A server's tensors lie flat in the message in which workers pull them, header included; on a GPU they lie there by
themselves, and the message, in host memory, is a buffer. So is the room in which a server adds up gradients: one
tensor, and on a GPU another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardscope.analytic.communication.parameter_server import HEADER_BYTES
from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.rank_states import Ints, RankStates, placed_states
from shardscope.spec.model.step import ParameterRow


def server_states(
    step: JobStep, shards: Sequence[Sequence[ParameterRow]], *, dedicated: bool = False
) -> RankStates:
    """What servers and workers hold in a step.

    Args:
        step: Of a job.
        shards: The tensors of each server, which are the lowest ranks.
        dedicated: Whether the servers' ranks compute no gradients.
    """
    elsewhere: list[list[ParameterRow]] = [[] for _ in range(step.world_size - len(shards))]
    own = placed_states(step, [*shards, *elsewhere])
    is_server = np.arange(step.world_size) < len(shards)
    is_on_host = step.backend == "gloo"
    copies, grads = _bytes(step.rows, step), _bytes(step.trained, step)
    works: Ints = np.where(is_server & dedicated, 0, grads)
    return RankStates(
        parameters=copies + int(step.trace.buffer_bytes) + own.parameters + HEADER_BYTES * (is_server & is_on_host),
        gradients=works + own.gradients * (1 if is_on_host else 2),
        optimizer=own.optimizer,
    )  # fmt: skip


def _bytes(rows: Sequence[ParameterRow], step: JobStep) -> int:
    return step.element_bytes * sum(row.num_elements for row in rows)
