"""From a schedule to its table."""

from __future__ import annotations

from functools import lru_cache

from shardscope.analytic.schedules.table import Op, Table
from shardscope.errors import SpecError
from shardscope.spec.pipeline_schedule import PipelineSchedule


def build(
    schedule: PipelineSchedule | str, stages: int, microbatches: int, virtual_stages: int | None = None
) -> Table:
    """The table of a schedule.

    Args:
        schedule: A `PipelineSchedule`, or its name.
        stages: Ranks in the pipeline.
        microbatches: Of one pass.
        virtual_stages: Stages that each rank holds; None for the schedule's own default.

    Raises:
        SpecError: Unknown name, numbers that the schedule does not have, or an order that cannot be carried out.

    Example:
        >>> build("gpipe", stages=4, microbatches=8).bubble_fraction == 3 / 11
        True
    """
    asked = PipelineSchedule.resolve(schedule)
    held = asked.default_stages if virtual_stages is None else virtual_stages
    _check(asked, stages, microbatches, held)
    return _built(asked, stages, microbatches, held)


@lru_cache(maxsize=128)
def _built(schedule: PipelineSchedule, stages: int, microbatches: int, held: int) -> Table:
    rows = [schedule.order(rank, stages, microbatches, held) for rank in range(stages)]
    table = Table(tuple(tuple(Op(*op) for op in row) for row in rows), schedule.stage_ranks(stages, held))
    _check_table(schedule, table, microbatches)
    return table


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


def _check_table(schedule: PipelineSchedule, table: Table, microbatches: int) -> None:
    """Refuse what leaves out or repeats a pass, or has it on another rank.

    Raises:
        SpecError: With the pass.
    """
    for rank, row in enumerate(table.ranks):
        for stage in [stage for stage, at in enumerate(table.stage_ranks) if at == rank]:
            for batch in range(microbatches):
                passes = "".join(sorted(op.op for op in row if op[1:] == (stage, batch)))
                if passes not in ("BF", "FIW"):
                    raise SpecError(
                        f"schedule={schedule.name!r} gives rank {rank} the passes {passes or 'none'!r} of micro-batch "
                        f"{batch} on stage {stage}; give each one forward pass F and one backward pass, B or I and W"
                    )
        strangers = [op for op in row if table.stage_ranks[op.stage : op.stage + 1] != (rank,)]
        if strangers:
            raise SpecError(
                f"schedule={schedule.name!r} gives rank {rank} {strangers[0]}, whose stage it does not hold"
            )
    try:
        _ = table.order
    except ValueError as error:
        raise SpecError(f"schedule={schedule.name!r}: {error}; change its order") from None
