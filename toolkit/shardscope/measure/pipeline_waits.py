"""Waiting times of the ranks of a pipeline, as measured and with stages of equal cost.

A rank waits while it runs no pass between the first and the last pass of a step. Every fraction here is the mean over
ranks, as `Timeline.bubble_fraction` is for a schedule: with stages of equal cost, all waiting is the bubble.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from shardscope.analytic.schedules import build
from shardscope.analytic.schedules.table import ScheduleTable, Timeline
from shardscope.measure.compare.measured import warmed_up
from shardscope.runlog.schema import Event
from shardscope.spec import Job

_MOST_STEPS = 50
"""Maximum number of steps over which the median is taken: the newest ones."""


class PassTimes(NamedTuple):
    """Time from the first to the last pass of a step in seconds, and the fraction of it for which ranks wait."""

    seconds: float
    waiting: float


class PipelineWaits(NamedTuple):
    """Waiting in the steps of a run: the fraction of the time for which ranks wait, 0 to 1.

    Attributes:
        waiting: Measured fraction; the median over steps.
        bubble: Fraction in the schedule with stages of equal cost, without messages.
        uneven: Fraction in the schedule if each pass takes the median of the measured passes of its stage, without
            messages.
    """

    waiting: float
    bubble: float
    uneven: float


def pass_times(passes: Sequence[tuple[float, float]], world_size: int) -> PassTimes:
    """Return the time and the waiting of one step, from the start and the end of each pass on all ranks.

    Example:
        >>> pass_times([(0, 1), (1, 2)], world_size=2)
        PassTimes(seconds=2, waiting=0.5)
    """
    seconds = max(end for _, end in passes) - min(start for start, _ in passes)
    busy = sum(end - start for start, end in passes)
    return PassTimes(seconds, max(0.0, 1 - busy / (seconds * world_size)) if seconds else 0.0)


def typical(steps: Mapping[int, PassTimes]) -> PassTimes:
    """Return the medians over the newest steps, without the warm-up."""
    chosen = [steps[number] for number in warmed_up(steps)[-_MOST_STEPS:]]
    return PassTimes(median(each.seconds for each in chosen), median(each.waiting for each in chosen))


def pipeline_waits(events: Iterable[Event], job: Job) -> PipelineWaits | None:
    """Return the waiting in a run's steps; None if no step's schedule is recorded, or its schedule is unknown."""
    passes: dict[int, dict[int, list[tuple[float, float]]]] = {}
    lengths: dict[tuple[str, int], list[float]] = {}
    for event in events:
        if event["event"] == "schedule":
            own = [(start, end) for *_, start, end in event["ops"]]
            passes.setdefault(event["step"], {})[event["rank"]] = own
            for op, stage, _, start, end in event["ops"]:
                lengths.setdefault((op, stage), []).append(end - start)
    steps = {
        number: pass_times([each for own in rows.values() for each in own], job.world_size)
        for number, rows in passes.items()
        if len(rows) == job.world_size
    }
    table = _table(job) if steps else None
    if table is None or not {(op.op, op.stage) for op in table.ops} <= {*lengths}:
        return None
    medians = {key: median(values) for key, values in lengths.items()}
    uneven = Timeline.of(table, [medians[op.op, op.stage] for op in table.ops], 0.0)
    return PipelineWaits(typical(steps).waiting, table.bubble_fraction, uneven.bubble_fraction)


def schedule_bubble(job: Job) -> float | None:
    """Return the bubble of a job's schedule with stages of equal cost, 0 to 1; None if it has no known schedule."""
    table = _table(job)
    return None if table is None else table.bubble_fraction


def _table(job: Job) -> ScheduleTable | None:
    strategy: Any = job.strategy
    schedule = getattr(strategy, "schedule", None)
    if schedule is None or not schedule.is_here:
        return None
    count = job.num_micro_batches // strategy.passes(job.num_micro_batches)
    return build(schedule, job.world_size, count, strategy.stages_per_rank)
