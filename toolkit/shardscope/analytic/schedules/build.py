"""Build the table of a schedule."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from operator import index

from shardscope.analytic.schedules.table import ScheduledOp, ScheduleTable
from shardscope.errors import SpecError
from shardscope.spec.pipeline_schedule import PipelineSchedule


def build(
    schedule: PipelineSchedule | str, stages: int, microbatches: int, virtual_stages: int | None = None
) -> ScheduleTable:
    """Build the table of a schedule.

    Args:
        schedule: A `PipelineSchedule`, or its name.
        stages: Number of ranks in the pipeline.
        microbatches: Number of micro-batches in a step.
        virtual_stages: Number of stages per rank; None for the schedule's own default.

    Raises:
        SpecError: The name is unknown, the schedule does not support these sizes, or its order deadlocks.

    Example:
        >>> build("gpipe", stages=4, microbatches=8).bubble_fraction == 3 / 11
        True
    """
    asked = PipelineSchedule.resolve(schedule)
    held = asked.default_stages if virtual_stages is None else virtual_stages
    _check(asked, stages, microbatches, held)
    return _built(asked, stages, microbatches, held)


@lru_cache(maxsize=128)
def _built(schedule: PipelineSchedule, stages: int, microbatches: int, held: int) -> ScheduleTable:
    rows = tuple(_row(schedule, rank, stages, microbatches, held) for rank in range(stages))
    table = ScheduleTable(rows, schedule.stage_ranks(stages, held))
    _check_table(schedule, table, microbatches)
    return table


def _row(
    schedule: PipelineSchedule, rank: int, stages: int, microbatches: int, held: int
) -> tuple[ScheduledOp, ...]:
    try:
        ops = schedule.order(rank, stages, microbatches, held)
        return tuple(ScheduledOp(str(kind), index(stage), index(batch)) for kind, stage, batch in ops)
    except Exception as error:
        raise SpecError(
            f"schedule={schedule.name!r}: order(rank={rank}, ranks={stages}, microbatches={microbatches}, held={held}) "
            f"failed ({type(error).__name__}: {error}); let it return triples of a kind, a stage and a micro-batch"
        ) from error


def _check(schedule: PipelineSchedule, stages: int, microbatches: int, held: int) -> None:
    for field, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise SpecError(f"{field}={value}: a pipeline has at least 1")
    schedule.check_stages(held)
    if not schedule.accepts(microbatches, stages):
        raise SpecError(
            f"microbatches={microbatches}: the {schedule.name} schedule on {stages} ranks needs "
            f"{schedule.needs(stages)}"
        )


def _check_table(schedule: PipelineSchedule, table: ScheduleTable, microbatches: int) -> None:
    """Raise an error if the table omits or repeats a pass, or puts it on the wrong rank.

    Raises:
        SpecError: The table is wrong; the message names the pass.
    """
    held: dict[int, list[int]] = {}
    for stage, rank in enumerate(table.stage_ranks):
        held.setdefault(rank, []).append(stage)
    for rank, row in enumerate(table.ranks):
        passes: dict[tuple[int, int], str] = {}
        for op in row:
            if op.stage not in held[rank]:
                raise SpecError(
                    f"schedule={schedule.name!r} gives rank {rank} {op}, whose stage it does not hold; it holds "
                    f"{', '.join(map(str, held[rank]))}"
                )
            passes[op[1:]] = passes.get(op[1:], "") + op.op
        for stage, batch in product(held[rank], range(microbatches)):
            found = "".join(sorted(passes.pop((stage, batch), "")))
            if found not in ("BF", "FIW"):
                raise SpecError(
                    f"schedule={schedule.name!r} gives rank {rank} the passes {found or 'none'!r} of micro-batch "
                    f"{batch} on stage {stage}; there must be one forward pass (F) and one backward pass (either B, "
                    "or both I and W)"
                )
        if passes:
            stage, batch = next(iter(passes))
            raise SpecError(
                f"schedule={schedule.name!r} gives rank {rank} a pass of micro-batch {batch} on stage {stage}, and "
                f"there are micro-batches 0 to {microbatches - 1}"
            )
    try:
        _ = table.order
    except ValueError as error:
        raise SpecError(
            f"schedule={schedule.name!r} on {len(table.ranks)} ranks: {error}; change its order"
        ) from None
