"""Conformance tests for pipeline schedules."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardscope.analytic.schedules import build
from shardscope.conformance.method import MethodConformance
from shardscope.runtime import Run
from shardscope.runtime.tools.check import check
from shardscope.spec import Job, Strategy
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.registry import names, register
from shardscope.spec.space import Space
from shardscope.tuning import apply

_LAYERS = 12


def deep_model() -> nn.Module:
    """Return a model of 12 layers, enough for several stages on each of four ranks."""
    hidden = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(_LAYERS - 2)]
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), *hidden, nn.Linear(16, 10))


class PipelineScheduleConformance(MethodConformance):
    """Test that a schedule's tables are complete, that ranks execute them, and that the final weights are correct."""

    kind = PipelineSchedule

    def _job(self, **changes: Any) -> Job:
        schedule = register(self.method)()
        strategy = Strategy("pipeline", schedule=schedule, split="even")
        fields = {"model": deep_model, "data": "digits", "strategy": strategy, "world_size": 2, "steps": 4}
        return Job(**{**fields, "batch": {"global_batch": 48, "micro_batch": 6}, **changes})

    def test_it_is_an_axis_of_a_study(self) -> None:
        """A search space can offer the schedule as one of several choices, and a trial can apply it to a job."""
        own = f"pipeline:{self.method.name}"
        others = [f"pipeline:{name}" for name in names(self.kind) if name != self.method.name][:1]
        job = self._job()
        apply.check(job, Space(parameters={"strategy": [own, *others]}))
        chosen: Any = apply.apply(job, {"strategy": own}).strategy
        assert type(chosen.schedule) is self.method

    def test_it_survives_json(self) -> None:
        """A strategy that uses the schedule survives a round trip through JSON."""
        strategy = self._job().strategy
        assert Strategy.from_json(strategy.to_json()) == strategy

    def test_every_table_is_whole_and_can_be_carried_out(self) -> None:
        """Each pass occurs exactly once and no rank deadlocks, for up to 8 ranks and 3 micro-batches per rank."""
        schedule: Any = self.method()
        for ranks in range(1, 9):
            for count in range(1, 3 * ranks + 1):
                if schedule.accepts(count, ranks):
                    assert build(schedule, ranks, count).order

    def test_it_trains_what_one_process_trains(self) -> None:
        """Weights match those of a single-process run; fp64 rules out rounding as the cause of a difference."""
        for world_size in (2, 3, 4):
            report = check(self._job(world_size=world_size, precision="fp64"), steps=3)
            assert report.passed, f"on {world_size} ranks: {report}"

    def _check_records(self, run: Run) -> None:
        """Check that each rank recorded the passes of its table, in the same order."""
        strategy: Any = run.job.strategy
        table = build(strategy.schedule, run.job.world_size, 8, strategy.stages_per_rank)
        told = run.events("schedule")
        assert told, "no rank recorded its passes"
        for event in told:
            done = [tuple(op[:3]) for op in event["ops"]]
            assert done == [tuple(op) for op in table.ranks[event["rank"]]], (
                f"rank {event['rank']} did not execute the passes of its table in order; it executed {done}"
            )
