"""Build the table of a pipeline schedule, and check that it is complete and does not deadlock."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from operator import index

from shardscope.analytic.schedules.table import ScheduledOp, ScheduleTable
from shardscope.errors import SpecError
from shardscope.spec.pipeline_schedule import PipelineSchedule

MOST_PASSES = 1 << 22
"""Largest number of passes in a table, which take about 300 bytes each, and 1.7 KB in a simulation."""


def build(
    schedule: PipelineSchedule | str, stages: int, microbatches: int, virtual_stages: int | None = None
) -> ScheduleTable:
    """Build the table of a pipeline schedule.

    Args:
        schedule: A `PipelineSchedule`, or its name.
        stages: Number of ranks in the pipeline.
        microbatches: Number of micro-batches in a step.
        virtual_stages: Number of stages per rank; None for the schedule's default.

    Raises:
        SpecError: The name is unknown, the schedule does not support these numbers, or its order is incomplete or
            deadlocks.

    Example:
        >>> build("gpipe", stages=4, microbatches=8).bubble_fraction == 3 / 11
        True
    """
    asked = PipelineSchedule.resolve(schedule)
    held = asked.default_stages if virtual_stages is None else virtual_stages
    _check(asked, stages, microbatches, held)
    return _built(asked, stages, microbatches, held)


def most_microbatches(schedule: PipelineSchedule, stages: int, held: int) -> int:
    """Return the largest number of micro-batches for which `build` builds a table; 0 if there is none.

    Args:
        schedule: The schedule.
        stages: Number of ranks in the pipeline.
        held: Number of stages per rank.
    """
    most = MOST_PASSES // (2 * stages * held)
    return next((count for count in range(most, 0, -1) if schedule.accepts(count, stages)), 0)


@lru_cache(maxsize=128)
def _built(schedule: PipelineSchedule, stages: int, microbatches: int, held: int) -> ScheduleTable:
    rows = tuple(_row(schedule, rank, stages, microbatches, held) for rank in range(stages))
    table = ScheduleTable(rows, schedule.stage_ranks(stages, held), schedule.blocks)
    _check_table(schedule, table, microbatches)
    return table


def _row(
    schedule: PipelineSchedule, rank: int, stages: int, microbatches: int, held: int
) -> tuple[ScheduledOp, ...]:
    """Return one rank's operations, from the schedule's `order`.

    Raises:
        SpecError: `order` raised an error, or returned something other than triples.
    """
    try:
        ops = schedule.order(rank, stages, microbatches, held)
        return tuple(ScheduledOp(str(kind), index(stage), index(batch)) for kind, stage, batch in ops)
    except Exception as error:
        raise SpecError(
            f"schedule={schedule.name!r}: order(rank={rank}, ranks={stages}, microbatches={microbatches}, held={held}) "
            f'failed ({type(error).__name__}: {error}); make it return triples such as ("F", stage, micro_batch)'
        ) from error


def _check(schedule: PipelineSchedule, stages: int, microbatches: int, held: int) -> None:
    """Check that the schedule supports these numbers of ranks, micro-batches, and stages per rank.

    Raises:
        SpecError: The schedule does not support them.
    """
    for field, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise SpecError(f"{field}={value} is too few; a pipeline needs at least 1")
    schedule.check_stages(held)
    if 2 * stages * held * microbatches > MOST_PASSES:
        most = most_microbatches(schedule, stages, held)
        advice = f"use at most {most} micro-batches" if most else "use fewer stages"
        raise SpecError(
            f"microbatches={microbatches} on {stages * held} stages would be more than {MOST_PASSES:,} passes, which "
            f"take too much memory; {advice}"
        )
    if not schedule.accepts(microbatches, stages):
        raise SpecError(
            f"microbatches={microbatches}: the {schedule.name} schedule on {stages} ranks needs "
            f"{schedule.needs(stages)}"
        )


def _check_table(schedule: PipelineSchedule, table: ScheduleTable, microbatches: int) -> None:
    """Check that every pass occurs exactly once, on the rank that holds its stage, and that the order cannot deadlock.

    Raises:
        SpecError: The table fails a check; the message names the pass.
    """
    held: dict[int, list[int]] = {}
    for stage, rank in enumerate(table.stage_ranks):
        held.setdefault(rank, []).append(stage)
    for rank, row in enumerate(table.ranks):
        passes: dict[tuple[int, int], str] = {}
        for op in row:
            if op.stage not in held[rank]:
                raise SpecError(
                    f"schedule={schedule.name!r} schedules {op} on rank {rank}, which does not hold that stage; "
                    f"use its stages: {', '.join(map(str, held[rank]))}"
                )
            passes[op[1:]] = passes.get(op[1:], "") + op.op
        for stage, batch in product(held[rank], range(microbatches)):
            found = "".join(sorted(passes.pop((stage, batch), "")))
            if found not in ("BF", "FIW"):
                raise SpecError(
                    f"schedule={schedule.name!r} has {f'passes {found!r}' if found else 'no passes'} for "
                    f"micro-batch {batch} on stage {stage} (rank {rank}); it needs exactly one forward (F) "
                    "and one backward (B, or I and W)"
                )
        if passes:
            stage, batch = next(iter(passes))
            raise SpecError(
                f"schedule={schedule.name!r} schedules micro-batch {batch} on stage {stage} (rank {rank}), but "
                f"micro-batches are numbered 0 to {microbatches - 1}"
            )
    try:
        _ = table.order
    except SpecError as error:
        raise SpecError(
            f"schedule={schedule.name!r} on {len(table.ranks)} ranks: {error}; change what its `order` returns"
        ) from None
