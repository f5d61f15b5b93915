"""Every byte is booked to the step that sent it, whoever reads the run, and what observing sends is apart."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn

import shardscope as ss
from conformance.runs import small_job
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.summary import summarise
from shardscope.tuning.measured import TrialReader
from shardscope_widgets.trace import Trace

STEPS, HEADERS = 6, 48
"""A push and its answer have a header of 24 bytes each."""


class SlowOnTheLastRank(nn.Module):
    """The last rank takes its time, so that a server answers it long after its own rank's last step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))
        self.pause_s = 0.05 if os.environ.get("RANK") == "2" else 0.0

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.pause_s if self.training else 0.0)
        result: Tensor = self.layers(images)
        return result


def server_job(strategy: Any, **changes: Any) -> ss.Job:
    fields = {"model": SlowOnTheLastRank, "world_size": 3, "steps": STEPS, "batch": 48, **changes}
    return small_job(strategy=strategy, **fields)


def readers(run: ss.Run) -> Iterator[list[float]]:
    """What each reader takes the bytes of the steps, or their sum, to be."""
    yield list(run.metrics()["sent_bytes"])
    yield [step.sent_bytes for step in Trace.read(run).steps]
    yield [TrialReader(run).poll().bytes]


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
@pytest.mark.parametrize("dedicated", [False, True], ids=["beside a worker", "dedicated"])
def test_what_a_server_sends_for_a_step_is_booked_to_it_however_late(mode: str, dedicated: bool) -> None:
    strategy = ss.ParameterServer(
        mode=mode, servers=2 if mode == "ssp" and not dedicated else 1, dedicated=dedicated,
        budget="shared" if mode == "sync" else "per-worker",
    )  # fmt: skip
    job = server_job(strategy, eval_every=4, checkpoint=ss.Checkpoint(every=3))
    run = ss.launch(job).wait(120)
    assert run.state == "completed", run.error
    payload = 4 * sum(p.numel() for p in SlowOnTheLastRank().parameters())
    exchanges = 2 if strategy.servers == 1 else 3 - 1  # each shard goes to all workers but the one beside it
    each = exchanges * 2 * payload + HEADERS * exchanges * strategy.servers
    for told in readers(run):
        assert sum(told) == STEPS * each
        assert len(told) == 1 or set(told) == {each}
    summary = run.summary()
    assert summary.bytes_per_step == each
    assert summary.observing_bytes > 0


@pytest.mark.slow
def test_looking_at_a_run_more_often_leaves_the_bytes_of_its_steps_as_they_are() -> None:
    fields: dict[str, Any] = {"strategy": "zero-3", "steps": 4}
    plain = ss.launch(small_job(**fields)).wait(60)
    looking = ss.launch(small_job(**fields, eval_every=1, checkpoint=ss.Checkpoint(every=1))).wait(60)
    assert [sum(told) for told in readers(plain)] == [sum(told) for told in readers(looking)]
    assert plain.summary().observing_bytes < looking.summary().observing_bytes


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("plain", "observed", "names"),
    [
        (
            small_job(steps=4, compression="int8"),
            small_job(steps=4, compression="int8", record=ss.Record(noise_scale=True)),
            "noise_scale",
        ),
        (
            small_job(steps=4, world_size=3, batch=48, strategy=ss.Gossip(measure_every=100)),
            small_job(steps=4, world_size=3, batch=48, strategy=ss.Gossip(measure_every=1)),
            "consensus",
        ),
    ],
    ids=["noise scale", "gossip's distance"],
)
def test_what_measuring_sends_is_no_part_of_the_bytes_that_training_sends(
    plain: ss.Job, observed: ss.Job, names: str
) -> None:
    runs = [ss.launch(job).wait(60) for job in (plain, observed)]
    assert [list(readers(runs[0]))] == [list(readers(runs[1]))]
    assert names in {name for event in runs[1].events("step") for name in event["traffic"]}
    assert runs[0].summary().observing_bytes < runs[1].summary().observing_bytes


def test_runs_of_older_versions_are_read_as_they_are() -> None:
    """They tell of no late traffic, and nothing of what checkpoints have sent."""
    run = ss.launch(small_job(steps=3, checkpoint=ss.Checkpoint(every=1))).wait(60)
    older = []
    for event in run.events():
        assert event["event"] != "traffic"
        drop = ("traffic",) if event["event"] in ("checkpoint", "end") else ()
        older.append({key: value for key, value in event.items() if key not in drop})
    log = RunLog.of(run.job)
    log.feed(older)
    summary = summarise(log, "completed", run.job)
    assert summary.bytes_per_step == run.summary().bytes_per_step
    assert 0 < summary.observing_bytes < run.summary().observing_bytes
