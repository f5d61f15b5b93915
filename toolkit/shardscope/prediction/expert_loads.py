"""Loads of experts that differ, in the step of a job whose ranks hold different experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardscope.analytic.job_step import JobStep
from shardscope.errors import SpecError, quoted
from shardscope.methods.strategies.mesh import Mesh
from shardscope.methods.strategies.mesh.expert_axis import layers_of
from shardscope.prediction.traced import Traced

_DIGITS = 1e-6
"""Largest sum of fractions above 1, by rounding."""


def with_loads(step: JobStep, found: Traced, loads: Sequence[Sequence[float]]) -> JobStep:
    """Return a step with loads of experts; see `JobPrediction.with_expert_loads`."""
    mesh = step.job.strategy
    if not isinstance(mesh, Mesh) or mesh.expert == 1:
        raise SpecError(
            "expert_loads has no effect on a job without an expert axis, whose ranks all hold all experts; omit it, or "
            "give for example layout=ss.Layout(data=4, expert=4, ...)"
        )
    found_layers = layers_of(mesh, step)
    assert found_layers is not None
    experts, layers = found_layers.experts, found_layers.num_layers
    try:
        rows = [tuple(float(each) for each in row) for row in loads]
    except (TypeError, ValueError):
        raise SpecError(
            f"expert_loads={quoted(loads)} is not a list of rows of numbers; give a number for each expert, in one row "
            "or one for each layer"
        ) from None
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
