"""Loads of experts that differ, in the step of a job whose ranks hold different experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardscope.analytic.job_step import JobStep
from shardscope.errors import SpecError, quoted
from shardscope.prediction.traced import Traced
from shardscope.spec import Job

_DIGITS = 1e-6
"""Largest sum of fractions above 1, by rounding."""


def takes_loads(job: Job) -> bool:
    """Return whether the step of a job can be predicted with loads of experts: not if stages have its layers."""
    return int((job.strategy.degrees(job.world_size) or {}).get("pipeline", 1)) == 1


def with_loads(step: JobStep, found: Traced, loads: Sequence[Sequence[float]]) -> JobStep:
    """Return a step with loads of experts; see `JobPrediction.with_expert_loads`."""
    degree = getattr(step.job.strategy, "expert", 1)
    if degree == 1:
        raise SpecError(
            "expert_loads has no effect on a job without an expert axis, whose ranks all hold all experts; omit it, or "
            "give for example layout=ss.Layout(data=4, expert=4, ...)"
        )
    if not takes_loads(step.job):
        raise SpecError(
            "expert_loads is not available for a job with a pipeline, whose stages have the layers with experts; omit "
            "it, or give a layout with pipeline=1"
        )
    divided = [row.shape for row in step.trace.parameters if row.is_expert and len(row.shape) == 3]
    experts, layers = divided[0][0] * degree, len(divided) // 2  # two matrices in each layer
    rows = [tuple(float(each) for each in row) for row in loads]
    rows = rows * layers if len(rows) == 1 else rows
    if len(rows) != layers or any(len(row) != experts for row in rows):
        raise SpecError(
            f"expert_loads has {len(loads)} rows of {quoted([*dict.fromkeys(map(len, rows))])} numbers, but the model "
            f"has {layers} layers of {experts} experts; give a number for each expert, in one row or one for each layer"
        )
    for row in rows:
        if min(row) < 0 or not 0 < sum(row) <= 1 + _DIGITS:
            raise SpecError(
                f"expert_loads has a row {quoted(list(row))}, whose numbers are not fractions of all choices; "
                "divide the numbers of tokens by their sum"
            )
    return replace(step, expert_loads=tuple(rows), flops=found.table.flops)
