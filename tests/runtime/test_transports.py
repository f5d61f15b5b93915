"""The transport of a job: chosen, recorded, and without influence on results and counts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from conformance.runs import SHORT_TEXT, all_gone, endless_job, family, rank_pids, small_job
from shardscope.runlog.summary import Summary
from shardscope.spec.registry import names

STRATEGIES = [
    "ring",
    ss.Ring(directions=2),
    "tree",
    "hierarchical:2",
    "zero-1",
    "zero-2",
    "zero-3",
    "gossip",
    "parameter-server",
    ss.ParameterServer(servers=2),
    ss.ParameterServer(dedicated=True),
    *(f"pipeline:{schedule}" for schedule in names(ss.PipelineSchedule)),
]
"""Strategies that add in an order of their own. DDP leaves it to the transport, and asynchronous servers to chance."""
COMPRESSIONS = [name for name in names(ss.Compression) if name != "none"]


def trained(**changes: object) -> tuple[ss.Run, list[float]]:
    """A finished run, and the losses of its ranks in turn; a rank that computes none has None."""
    run = ss.launch(small_job(**changes))
    run.wait(60)
    ranks = range(run.job.world_size)
    return run, [event.get("loss") for rank in ranks for event in run.events("step", rank=rank)]


def test_a_job_names_its_transport() -> None:
    job = small_job(transport="shm")
    assert json.loads(job.to_json())["transport"] == "shm"
    assert ss.Job.from_json(job.to_json()) == job
    assert small_job().transport == "auto"
    with pytest.raises(ss.SpecError, match="transport='udp'"):
        small_job(transport="udp")


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_a_run_says_which_transport_it_used_and_why(transport: str) -> None:
    run, _ = trained(transport=transport)
    summary = run.summary()
    used = "tcp" if transport == "tcp" else "shm"
    assert summary.transport == used
    assert summary.transport_reason
    assert {event["transport"] for event in run.events("start")} == {used}
    assert {event["backend"] for event in run.events("start")} == {"gloo"}


def test_a_single_rank_has_none() -> None:
    run, _ = trained(strategy="single", world_size=1)
    assert run.summary().transport is None


def same_on_both(**changes: Any) -> tuple[Summary, Summary]:
    """Summaries of a job over shared memory and over TCP, which has the same losses and sends the same bytes."""
    summaries: dict[str, Summary] = {}
    losses: dict[str, list[float]] = {}
    for transport in ("shm", "tcp"):
        run, losses[transport] = trained(**{"world_size": 4, **changes, "transport": transport})
        summaries[transport] = run.summary()
        assert summaries[transport].transport == transport
    assert losses["shm"] == losses["tcp"]
    assert summaries["shm"].bytes_per_step == summaries["tcp"].bytes_per_step
    return summaries["shm"], summaries["tcp"]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_losses_and_counts_do_not_depend_on_it(strategy: Any) -> None:
    """Losses are equal to the bit.

    The all-reduce that averages the parameters of gossip's ranks for the evaluation is the transport's.
    """
    is_pipeline = str(strategy).startswith("pipeline")
    small_gpt = {"model": "gpt-nano", "data": SHORT_TEXT, "batch": 16, "steps": 3, "world_size": 2}
    fields: dict[str, Any] = small_gpt if is_pipeline else {"batch": 48}
    over_shm, over_tcp = same_on_both(strategy=strategy, **fields)
    assert over_shm.test_loss == pytest.approx(over_tcp.test_loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_no_compressor_depends_on_it(compression: str) -> None:
    """What a compressor sums goes through the strategy's all-reduce, here the ring; the rest is packets."""
    optimizer = {"onebit-lamb": "lamb", "dgc": "sgd"}.get(compression, "adamw")
    same_on_both(compression=compression, optimizer=optimizer, batch=48)


@pytest.mark.slow
def test_two_ranks_add_alike_whoever_adds() -> None:
    """Of more, gloo adds along its ring, and shared memory in the order of the ranks: sums differ in the last bits."""
    same_on_both(strategy="all-reduce", world_size=2)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_nothing_is_left() -> None:
    before = set(Path("/dev/shm").iterdir())
    run = ss.launch(endless_job(strategy="ring", world_size=4, transport="shm"))
    pids, processes = rank_pids(run), family(run)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(ss.RunFailed, match="rank 2 of strategy 'ring' was killed by SIGKILL"):
        run.wait(60)
    assert all_gone(processes)
    new = {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    assert not [name for name in new if "shardscope" in name and not name.startswith("shardscope-link-")]
