"""From a schedule's name to its table."""

from __future__ import annotations

from collections.abc import Callable

from shardscope.analytic.schedules.interleaved import interleaved, zero_bubble
from shardscope.analytic.schedules.plain import gpipe, one_forward_one_backward
from shardscope.analytic.schedules.table import Op, Table
from shardscope.analytic.schedules.v_shaped import dualpipev, zbv
from shardscope.errors import SpecError, unknown_name
from shardscope.spec.strategy.pipeline import SHAPES, Pipeline

RankOrder = Callable[[int, int, int, int], list[Op]]
"""Takes rank, ranks, micro-batches and stages a rank; gives the rank's operations in order."""

SCHEDULES: dict[str, RankOrder] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
"""Every schedule, by name."""


def build(name: str, stages: int, microbatches: int, virtual_stages: int | None = None) -> Table:
    """The table of a schedule.

    Args:
        name: ``gpipe``, ``1f1b``, ``interleaved``, ``zero-bubble``, ``zbv`` or ``dualpipev``.
        stages: Ranks in the pipeline.
        microbatches: Of one pass.
        virtual_stages: Stages that each rank holds; None for the schedule's own default.

    Raises:
        SpecError: Unknown name, or numbers that the schedule does not have.

    Example:
        >>> build("gpipe", stages=4, microbatches=8).bubble_fraction == 3 / 11
        True
    """
    if name not in SCHEDULES:
        raise unknown_name("schedule", name, SCHEDULES)
    shape = Pipeline(schedule=name, virtual_stages=virtual_stages)
    if not shape.accepts(microbatches, stages):
        raise SpecError(
            f"microbatches={microbatches}: the {name} schedule on {stages} ranks needs {shape.needs(stages)}"
        )
    held = shape.stages_per_rank
    ranks = tuple(tuple(SCHEDULES[name](rank, stages, microbatches, held)) for rank in range(stages))
    return Table(ranks, shape.stage_ranks(stages))


assert SCHEDULES.keys() == SHAPES.keys()
