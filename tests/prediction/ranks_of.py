"""What tests of predictions share: a job's steps on real ranks, with memory measured in each, and what they held."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shardscope as ss
from conformance.ranks import RankPool
from shardscope.analytic.job_step import JobStep
from shardscope.measure.compare.comparison import Comparison
from shardscope.measure.compare.of_run import compare
from shardscope.runtime import Run
from shardscope.runtime.record.rundir import RunDir
from shardscope.spec.model.step import StepTrace
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

Events = list[dict[str, Any]]
"""Of one rank."""

EVERY_STEP = ss.Record(memory_first=1, memory_every=1, messages_first=0)
"""Without a log of messages, which `run_on` does not write; shards would go around a ring for it."""
Counted = dict[int, dict[str, tuple[int, int]]]
"""By step and collective: bytes and messages."""
KINDS = ("parameters", "gradients", "optimizer")
KINDS_SEEN = (*KINDS, "activations", "gathered", "buffers")


def run_on(pool: RankPool, job: ss.Job, folder: Path) -> list[Events]:
    """The events of each rank that tell of what it sent and held, after all steps of a job."""

    def body(context: RankContext) -> Events:
        trainer = Trainer(job, context, context.events.path.parent)
        for step in range(1, job.steps + 1):
            trainer.take_step(step)
        with context.meter.observing():
            trainer.strategy.synchronize(job.steps, ending=True)
        trainer._write_late_traffic()
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
            mine = {kind: measured[kind] for kind in kinds}
            assert mine == expected, f"step {number}, rank {rank}: {mine} is not {expected}"
            num_exact += len(kinds)
    return num_exact


def hold_traffic(job: ss.Job, trace: StepTrace, ranks: Sequence[Events]) -> int:
    """Assert that each rank sends what is predicted in every step; returns how many collectives were exact."""
    num_exact = 0
    for number in range(1, job.steps + 1):
        said = job.strategy.traffic(JobStep(job, trace, number))
        assert said is not None
        for rank, events in enumerate(ranks):
            measured, where = dict(_by_step(events).get(number, {})), f"step {number}, rank {rank}"
            for name, sent in said.items():
                num_bytes, messages = measured.pop(name, (0, 0))
                if sent.bounds is None:
                    predicted = (sent.bytes[rank], sent.messages[rank])
                    assert (num_bytes, messages) == predicted, f"{name}, {where}"
                    num_exact += 1
                else:
                    least, most = (int(bound[rank]) for bound in sent.bounds)
                    assert least <= num_bytes <= most, f"{name}, {where}"
                    assert least <= sent.bytes[rank] <= most
            assert not measured, f"not predicted in {where}: {measured}"
    return num_exact


def hold_compared(job: ss.Job, folder: Path) -> Comparison:
    """Assert that `compare` agrees, and that each term that the ranks have measured has its counterpart."""
    run = Run(RunDir(folder), job)
    found = compare(run)
    assert found.disagreeing == ()
    lonely = [note for note in found.notes if "has no term for it" in note]
    is_timed = not job.compression.is_on or job.compression.codec_passes is not None
    assert not [note for note in lonely if is_timed or not note.startswith("codec ")]
    last = [event for event in run.events() if event.get("step") == job.steps]
    sent = {name for event in last for name, row in event.get("traffic", {}).items() if row["sent_bytes"]}
    assert sent <= {row.term for row in found.rows if row.group == "bytes"}
    held = {kind for event in last if event["event"] == "memory" for kind in KINDS_SEEN if event[kind]}
    assert held - ({"buffers"} if "buffers is left out" in str(found.notes) else set()) <= {
        row.term for row in found.rows if row.group == "memory"
    }
    if "gathered" in held and job.recompute == "none":
        assert all(predicted == measured for predicted, measured in found["memory", "gathered"].by_rank)
    assert {"forward", "backward", "optimizer"} <= {row.term for row in found.rows if row.group == "time"}
    return found


def _by_step(events: list[dict[str, Any]]) -> Counted:
    found: Counted = {}
    for event in events:
        for name, row in event.get("traffic", {}).items():
            if row["sent_bytes"] or row["messages"]:
                before = found.setdefault(event["step"], {}).get(name, (0, 0))
                found[event["step"]][name] = (before[0] + row["sent_bytes"], before[1] + row["messages"])
    return found
