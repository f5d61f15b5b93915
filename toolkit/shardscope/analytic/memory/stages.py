"""Bytes that the ranks of a pipeline hold: parameters, gradients and optimizer state of each rank's own layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.held import RankStates, placed_states
from shardscope.analytic.memory.work_space import updates_of
from shardscope.analytic.stage_trace import PLACEHOLDER
from shardscope.spec.model.step import ParameterRow, PipelinePiece


def pipeline_states(step: JobStep, stages: Sequence[tuple[int, Sequence[PipelinePiece]]]) -> RankStates:
    """Return the states that each rank of a pipeline holds in a step.

    Args:
        step: A step of a job.
        stages: For each stage, its rank and its layers.
    """
    pieces: list[list[PipelinePiece]] = [[] for _ in range(step.world_size)]
    for rank, layers in stages:
        pieces[rank] += layers
    placed = [_rows(step, held) for held in pieces]
    found = placed_states(step, placed).with_work_buffers(
        step, lambda: np.array([updates_of(rows, step) for rows in placed])
    )
    sizes = step.trace.buffer_sizes
    used = [{place for piece in held for place in piece.buffers} for held in pieces]
    buffers = np.array([sum(sizes[place] for place in places) for places in used], dtype=np.int64)
    return found._replace(parameters=found.parameters + buffers)


def _rows(step: JobStep, held: Sequence[PipelinePiece]) -> list[ParameterRow]:
    """Return the parameters of the given layers, without duplicates."""
    places = {place for piece in held for place in piece.parameters}
    rows = [step.rows[place] for place in sorted(places)]
    return rows if any(row.is_trained for row in rows) else [*rows, PLACEHOLDER]
