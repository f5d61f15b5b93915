"""The collectives that layers of a traced model call on one axis, at their times within a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardscope.methods.strategies.sharded import norm_traffic

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import When
    from shardscope.analytic.job_step import Backend, JobStep
    from shardscope.spec.model.step import AxisMessage

ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
"""Rounds of the backend's messages in a collective, in units of the number of other ranks."""


def messages_of(step: JobStep, micro_batch: int) -> list[AxisMessage]:
    """Return the collectives that the passes of a micro-batch call on all axes, in the order of the calls."""
    return [each for each in step.trace.messages.get(step.job.recompute, ()) if each.is_called(micro_batch)]


def collectives_of(axis: str, step: JobStep) -> Iterator[tuple[When, str, int]]:
    """Yield the time, name and bytes of each collective of an axis in a step, in the order of the calls."""
    from shardscope.analytic.communication.plan import When

    for micro_batch in range(step.micro_batches):
        messages = messages_of(step, micro_batch)
        counts, seen = Counter(each.phase for each in messages), Counter[str]()
        for each in messages:
            seen[each.phase] += 1
            if each.axis == axis:
                when = When(each.phase, seen[each.phase] / (counts[each.phase] + 1), micro_batch)
                yield when, each.op, round(each.sample_bytes * step.samples) + each.fixed_bytes


def traffic_of(op: str, num_bytes: int, size: int, backend: Backend) -> Traffic:
    """Return the traffic of one collective of `size` ranks; ``send`` is a message from each rank to the next."""
    import numpy as np

    from shardscope.analytic.communication.traffic import Sent, by_backend, one_by_one

    if op == "send":
        return {op: Sent(np.full(size, num_bytes), np.ones(size, dtype=np.int64))}
    return one_by_one(by_backend(op, num_bytes, size, backend=backend), ROUNDS[op] * (size - 1))


def norms(step: JobStep, size: int) -> Iterator[Traffic]:
    """Yield the traffic of the sums of norms over an axis of `size` ranks that hold different parts of the model."""
    from shardscope.analytic.communication.traffic import one_by_one

    for traffic in norm_traffic(step, ranks=size):
        yield one_by_one(traffic, ROUNDS["all_reduce"] * (size - 1))
