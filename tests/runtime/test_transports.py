"""The transport of a job: chosen, recorded, and without influence on results and counts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import shardscope as ss
from conformance.runs import all_gone, endless_job, family, rank_pids, small_job
from shardscope.runlog.summary import Summary

STRATEGIES = [
    "ring",
    "tree",
    "hierarchical:2",
    "zero-1",
    "zero-2",
    "zero-3",
    "gossip",
    "parameter-server",
    "pipeline",
]


def trained(**changes: object) -> tuple[ss.Run, list[float]]:
    """A finished run, and its losses."""
    run = ss.launch(small_job(**changes))
    run.wait(60)
    return run, [event["loss"] for event in run.events("step", rank=0)]


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_and_counts_do_not_depend_on_it(strategy: str) -> None:
    """Losses are equal to the bit, as Shardscope's own collectives add in an order of their own.

    The all-reduce that averages the parameters of gossip's ranks for the evaluation is the transport's.
    """
    summaries: dict[str, Summary] = {}
    losses: dict[str, list[float]] = {}
    for transport in ("shm", "tcp"):
        run, losses[transport] = trained(strategy=strategy, world_size=4, transport=transport)
        summaries[transport] = run.summary()
    assert losses["shm"] == losses["tcp"]
    assert summaries["shm"].bytes_per_step == summaries["tcp"].bytes_per_step
    assert summaries["shm"].test_loss == pytest.approx(summaries["tcp"].test_loss, rel=1e-6)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_nothing_is_left() -> None:
    before = set(Path("/dev/shm").iterdir())
    run = ss.launch(endless_job(strategy="ring", world_size=4, transport="shm"))
    pids, processes = rank_pids(run), family(run)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(ss.RunFailed, match="rank 2 of strategy 'ring' was killed by SIGKILL"):
        run.wait(60)
    assert all_gone(processes)
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "shardscope" in path.name]
