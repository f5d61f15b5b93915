"""What tests of predictions share: a job's steps on real ranks, with memory measured in each, and what they held."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shardscope as ss
from conformance.ranks import RankPool
from shardscope.analytic.job_step import JobStep
from shardscope.spec.model.step import StepTrace
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

Events = list[dict[str, Any]]
"""Of one rank."""

EVERY_STEP = ss.Record(memory_first=1, memory_every=1)
KINDS = ("parameters", "gradients", "optimizer")


def run_on(pool: RankPool, job: ss.Job, folder: Path) -> list[Events]:
    """The events of each rank that tell of what it sent and held, after all steps of a job."""

    def body(context: RankContext) -> Events:
        trainer = Trainer(job, context, context.events.path.parent)
        for step in range(1, job.steps + 1):
            trainer.take_step(step)
        with context.meter.observing():
            trainer.strategy.meet(job.steps, ending=True)
        trainer._tell_late()
        if trainer.loader is not None:
            trainer.loader.close()
        trainer.strategy.close()
        rows = [json.loads(line) for line in context.events.path.read_text().splitlines()]
        return [row for row in rows if row["event"] in ("step", "traffic", "memory")]

    return pool.run(body, folder)


def hold_states(job: ss.Job, trace: StepTrace, ranks: Sequence[Events]) -> int:
    """Assert that each rank holds what is predicted, to the byte, in every step; returns how many peaks agree."""
    num_exact = 0
    for number in range(1, job.steps + 1):
        said = job.strategy.states(JobStep(job, trace, number))
        assert said is not None
        assert said.is_exact
        for rank, events in enumerate(ranks):
            measured = next(row for row in events if row["event"] == "memory" and row["step"] == number)
            kinds = KINDS if said.buffers is None else (*KINDS, "buffers")
            expected = {kind: int(getattr(said, kind)[rank]) for kind in kinds}
            assert {kind: measured[kind] for kind in kinds} == expected, f"step {number}, rank {rank}"
            num_exact += len(kinds)
    return num_exact
