"""From a schedule's name to its table."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from shardscope.analytic.schedules.building_block import v_half, v_min
from shardscope.analytic.schedules.facts import FACTS, Facts
from shardscope.analytic.schedules.interleaved import interleaved, zero_bubble
from shardscope.analytic.schedules.plain import gpipe, one_forward_one_backward
from shardscope.analytic.schedules.split import zb_h1, zb_h2
from shardscope.analytic.schedules.table import Op, Table
from shardscope.analytic.schedules.v_shaped import dualpipev, zbv
from shardscope.errors import SpecError, unknown_name

RankOrder = Callable[[int, int, int, int], list[Op]]
"""Takes rank, ranks, micro-batches and stages a rank; gives the rank's operations in order."""

SCHEDULES: dict[str, RankOrder] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipev": dualpipev,
}
"""Every schedule, by name."""


def build(name: str, stages: int, microbatches: int, virtual_stages: int | None = None) -> Table:
    """The table of a schedule.

    Args:
        name: One of `SCHEDULES`, which are those of `spec.layout.SCHEDULE_NAMES`.
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
    facts = FACTS[name]
    held = facts.shape.default if virtual_stages is None else virtual_stages
    _check(facts, stages, microbatches, held)
    return _built(name, stages, microbatches, held)


@lru_cache(maxsize=128)
def _built(name: str, stages: int, microbatches: int, held: int) -> Table:
    ranks = tuple(tuple(SCHEDULES[name](rank, stages, microbatches, held)) for rank in range(stages))
    return Table(ranks, FACTS[name].stage_ranks(stages, held))


def _check(facts: Facts, stages: int, microbatches: int, held: int) -> None:
    for field, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise SpecError(f"{field}={value}: a pipeline has at least 1")
    least, most = facts.shape.least, facts.shape.most
    if held < least or (most is not None and held > most):
        bound = f"exactly {least}" if least == most else f"at least {least}"
        raise SpecError(
            f"virtual_stages={held}: the {facts.name} schedule has {bound} stages a rank; "
            f"use virtual_stages={facts.shape.default}"
        )
    if not facts.accepts(microbatches, stages):
        raise SpecError(
            f"microbatches={microbatches}: the {facts.name} schedule on {stages} ranks needs {facts.needs(stages)}"
        )


assert SCHEDULES.keys() == FACTS.keys()
