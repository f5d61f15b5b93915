"""Ranks join and leave while a job trains, and it ends where it would have ended without them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.elastic import STEPS, apart, elastic_job, fixed, resized
from conformance.runs import all_gone, endless_job, family, rank_pids, small_job, wait_for
from shardscope.runlog import clock
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.agent.failure import Ending
from shardscope.runtime.agent.resizing import cannot_start
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.status import Cause

BOUND = 1e-5
"""That of the equivalence of a job with the same job on one process."""
QUICK = ("ring", pytest.param("zero-3", marks=pytest.mark.slow))
OTHERS = (
    "ring:2", "tree", "all-reduce", "hierarchical", "zero-1", "zero-2", "parameter-server", "pipeline:gpipe",
    "pipeline:1f1b", "pipeline:zero-bubble",
)  # fmt: skip
STEP = {
    "loss": 1.0, "samples": 8, "tokens": None, "step_time_s": 0.1, "lr": 0.1, "grad_norm": 1.0, "memory_bytes": 1,
    "peak_memory_bytes": 1, "traffic": {},
}  # fmt: skip
"""What an event of a step must say besides its number."""
OWN_ORDER = ["parameter-server:async", "parameter-server:ssp", "gossip"]


@pytest.mark.parametrize(
    "strategy", [*QUICK, *(pytest.param(each, marks=pytest.mark.weekly) for each in OTHERS)]
)
def test_a_job_ends_where_it_ends_on_a_fixed_number_of_ranks(strategy: str) -> None:
    job = elastic_job(strategy=strategy)
    run = resized(job, 4, 3, 2)
    log, summary = run.reduced(), run.summary()
    assert [each[1:3] for each in log.resizes] == [(2, 4), (4, 3), (3, 2)]
    assert {each.source for each in log.resizes} == {"disk"}
    assert (run.state, summary.world_sizes, summary.world_size) == ("completed", "2 → 4 → 3 → 2", 2)
    assert list(log.steps.column("number")) == list(range(1, STEPS + 1))  # none lost, none twice
    assert len({event["step"] for event in run.events("step", rank=0)}) == len(run.events("step", rank=0))
    if job.strategy.num_data_ranks(2) == 2:
        assert sum(log.steps.column("samples")) == 48 * STEPS
    assert max(apart(run, fixed(job))) < BOUND
    told = [(event["before"], event["world_size"]) for event in run.events("resize")]
    assert told == [(2, 4), (4, 3), (3, 2)]


@pytest.mark.weekly
@pytest.mark.parametrize("strategy", ["ring", "zero-3", "all-reduce"])
def test_a_batch_that_cannot_be_divided_evenly_is_divided_as_evenly_as_possible(strategy: str) -> None:
    job = elastic_job(strategy=strategy, batch=50)
    run = resized(job, 3, 4)
    samples = {(event["rank"], event["samples"]) for event in run.events("step") if event["step"] == STEPS}
    assert samples == {(0, 13), (1, 13), (2, 12), (3, 12)}
    assert set(run.reduced().steps.column("samples")) == {50}
    assert max(apart(run, fixed(job))) < BOUND


@pytest.mark.weekly
@pytest.mark.parametrize("strategy", OWN_ORDER)
def test_strategies_without_a_fixed_order_go_on_too(strategy: str) -> None:
    run = resized(elastic_job(strategy=strategy, optimizer="adamw"), 4, 3, 2)
    losses = run.metrics()["loss"]
    assert run.summary().world_sizes == "2 → 4 → 3 → 2"
    assert run.summary().last_step == STEPS
    assert losses.iloc[-3:].mean() < losses.iloc[:3].mean()


@pytest.mark.weekly
def test_a_scaled_batch_sees_each_row_once_and_takes_the_learning_rate_along() -> None:
    job = elastic_job(elastic=ss.Elastic(least=2, most=4, batch="scaled"))
    run = resized(job, 4)
    steps = run.reduced().steps
    assert set(zip(steps.column("world_size"), steps.column("samples"), steps.column("lr"), strict=True)) == {
        (2, 48, 0.05),
        (4, 96, 0.1),
    }


@pytest.mark.parametrize("spares", [0, pytest.param(1, marks=pytest.mark.weekly)])
def test_a_run_that_loses_a_rank_goes_on_with_fewer_unless_there_is_a_spare(spares: int) -> None:
    elastic = ss.Elastic(least=2, most=4, spares=spares)
    job = elastic_job(world_size=3, elastic=elastic, recovery=1, checkpoint=ss.Checkpoint(2), steps=12)
    faults = ss.Faults().kill(rank=1, step=6).slow(2, factor=2, steps=(9, 9))
    run = ss.launch(job, faults=faults).wait(120)
    sizes = [3] * 12 if spares else [3] * 4 + [2] * 8
    assert list(run.metrics()["world_size"]) == sizes
    assert [(event["step"], event["world_size"]) for event in run.events("restart")] == [(4, sizes[-1])]
    assert run.state_text == "completed after 1 restart"
    assert run.summary().world_sizes == (None if spares else "3 → 2")
    assert max(apart(run, fixed(job.replace(recovery=None)))) < BOUND
    kill, late = run.events("fault")
    assert (kill["rank"], kill["kind"], late["step"]) == (1, "kill", 9)
    assert (late["rank"], late["kind"]) == ((2, "slow") if spares else (0, "left-out"))
    assert spares or late["text"].endswith("not carried out, because the run has 2 ranks")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_new_ranks_go_on_from_the_copies_in_memory_and_stop_knows_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = resized(elastic_job(steps=8, recovery=ss.Recovery(1, replica_every=1)), 4)
    assert [each["source"] for each in run.events("resume", rank=0)] == ["replica"]
    assert [(event["before"], event["world_size"]) for event in run.events("resize")] == [(2, 4)]
    known: list[tuple[int, object]] = []
    monkeypatch.setattr(
        "shardscope.runtime.record.run.end_run", lambda _agent, ranks, _patience: known.extend(ranks)
    )
    run.stop()
    assert len({pid for pid, _ in known}) == 6


def test_requests_that_cannot_be_met_are_refused_with_a_way_out() -> None:
    run = ss.launch(endless_job(batch=64, elastic="2:4", strategy="gossip"))
    rank_pids(run)
    with pytest.raises(ss.SpecError, match=r"64 is not divisible by world_size=3.* can train on 2, 4 ranks"):
        run.resize(3)
    with pytest.raises(ss.SpecError, match="world_size=8 is outside elastic='2:4'"):
        run.resize(8)
    for given in ("4", 4.0, None):
        with pytest.raises(ss.SpecError, match=r"is not a whole number; give 4, for example"):
            run.resize(given)  # type: ignore[arg-type]
    processes = family(run)
    run.resize(4)
    run.stop(grace_s=60.0)  # comes first, whether or not the ranks were about to change
    assert run.state == "stopped"
    assert all_gone(processes)
    with pytest.raises(ss.SpecError, match="has ended; resume it with another number of ranks"):
        run.resize(2)


@pytest.mark.weekly
def test_a_run_is_resized_before_its_first_step_and_at_its_last_one() -> None:
    run = ss.launch(elastic_job(steps=6))
    run.resize(4)
    wait_for(lambda: run.reduced().last_step >= 6, run)
    if run.is_alive:
        run.resize(3)
    run.wait(60)
    assert list(run.metrics()["step"]) == list(range(1, 7))
    assert run.metrics()["world_size"].iloc[-1] == 4


def test_a_job_of_a_fixed_size_is_not_resized() -> None:
    run = ss.launch(small_job()).wait(60)
    with pytest.raises(
        ss.SpecError,
        match="start the job with elastic=",
    ):
        run.resize(4)


def deep(layers: int, fails_on: int = 0) -> Any:
    """A model with this many layers; building it fails at one world size."""

    def make() -> nn.Module:
        if os.environ["WORLD_SIZE"] == str(fails_on):
            raise RuntimeError("this many ranks cannot build it")
        hidden = [nn.Linear(64, 64) for _ in range(layers - 2)]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))

    return make


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("strategy", "layers", "refusal"),
    [
        ("pipeline:interleaved", 7, "7 layers to split, fewer than the pipeline's 8 stages"),
        ("pipeline:1f1b", 3, "3 layers to split, fewer than the pipeline's 4 stages"),
        (ss.Pipeline(schedule="1f1b", virtual_stages=1), 9, None),
        ("ring", 3, None),
    ],
)
def test_a_size_for_which_a_users_model_is_not_deep_enough_is_refused(
    strategy: Any, layers: int, refusal: str | None
) -> None:
    job = ss.Job(
        model=deep(layers, fails_on=4 if refusal is None else 0), data="digits", strategy=strategy, world_size=2,
        batch=ss.Batch(16, micro_batch=2), steps=40, elastic="2:4", checkpoint=10,
    )  # fmt: skip
    run = ss.launch(job)
    wait_for(lambda: len(run.metrics()) >= 2)
    if refusal is None:  # only the new ranks find out; the former number goes on
        run.resize(4)
    else:
        with pytest.raises(ss.SpecError, match=refusal):
            run.resize(4)
    assert run.wait(100).state == "completed", run.error
    summary = run.summary()
    assert (summary.last_step, summary.world_size, summary.lost_steps) == (40, 2, 0)
    told = [event["cause"] for event in run.events("restart")]
    assert [("cannot build it" in cause) for cause in told] == ([] if refusal else [True])


def test_a_batch_that_would_grow_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    job = small_job(batch=800, elastic=ss.Elastic(least=2, most=4, batch="scaled"))
    run = Run(RunDir.create(job, tmp_path), job)
    with pytest.raises(
        ss.errors.DataError, match="global_batch=1600 is out of range for data with 1442 rows"
    ):
        run.resize(4)
    assert not RunDir(run.path).resize_request.exists()


@pytest.mark.parametrize(
    ("ending", "newest", "goes_on"),
    [
        (Ending("failed", cause=Cause.NOT_STARTED), "step", True),  # of the former ranks
        (Ending("failed", cause=Cause.KILLED), "process", True),
        (Ending("failed", cause=Cause.KILLED), "new step", False),
        (Ending("failed", cause=Cause.REQUESTED), "process", False),
        (Ending("completed"), "process", False),
    ],
)
def test_the_former_ranks_go_on_only_if_the_new_ones_have_taken_no_step(
    tmp_path: Path, ending: Ending, newest: str, goes_on: bool
) -> None:
    job = small_job(elastic="2:4")
    run = RunDir.create(job, tmp_path)
    with EventWriter(run.rank_file(0), 0) as events:
        events.emit("process", pid=1, started="")
        events.emit("step", step=1, **STEP)
        began_t = clock.now()
        time.sleep(0.01)
        if newest != "step":
            events.emit("process", pid=2, started="")
        if newest == "new step":
            events.emit("step", step=2, **STEP)
    assert cannot_start(run, ending, began_t) is goes_on
