"""The collectives that layers of a traced model call on one axis, at their times within a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.analytic.communication.plan import When
    from shardscope.analytic.job_step import JobStep

_PHASES = ("forward", "backward")


def messages_of(axis: str, step: JobStep) -> Iterator[tuple[When, str, int]]:
    """Yield time, name and bytes of each collective of an axis in a step, in the order of the calls."""
    from shardscope.analytic.communication.plan import When

    messages = step.trace.messages.get(step.job.recompute, ())
    counts = {phase: sum(each.phase == phase for each in messages) for phase in _PHASES}
    for micro_batch in range(step.micro_batches):
        seen = dict.fromkeys(_PHASES, 0)
        for each in messages:
            seen[each.phase] += 1
            if each.axis == axis:
                when = When(each.phase, seen[each.phase] / (counts[each.phase] + 1), micro_batch)
                yield when, each.op, round(each.sample_bytes * step.samples) + each.parameter_bytes
