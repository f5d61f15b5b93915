"""A rank dies under any strategy: the run ends with one sentence that names it and its role, and nothing is left."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import shardscope as ss
from conformance.runs import all_gone, endless_job, family, rank_pids

DEDICATED = ss.ParameterServer(mode="async", dedicated=True)
Kill = tuple[Any, int, int, str]
ALL_REDUCE: list[Kill] = [
    ("all-reduce", 3, 0, "rank 0 of strategy 'all-reduce'"),
    ("all-reduce", 3, 2, "rank 2 of strategy 'all-reduce'"),
    ("ring", 3, 0, "rank 0 of strategy 'ring'"),
    ("ring", 3, 2, "rank 2 of strategy 'ring'"),
]
TREES: list[Kill] = [
    ("tree", 4, 0, "rank 0 of strategy 'tree'"),
    ("tree", 4, 3, "rank 3 of strategy 'tree'"),
    ("hierarchical:2", 4, 0, "rank 0 of strategy 'hierarchical:2'"),
    ("hierarchical:2", 4, 3, "rank 3 of strategy 'hierarchical:2'"),
]
SHARDED: list[Kill] = [
    ("zero-1", 3, 1, "rank 1 of strategy 'zero-1'"),
    ("zero-2", 3, 1, "rank 1 of strategy 'zero-2'"),
    ("zero-3", 3, 1, "rank 1 of strategy 'zero-3'"),
]
SERVERS_AND_GOSSIP: list[Kill] = [
    (ss.Gossip(), 3, 1, "rank 1 of strategy 'gossip'"),
    (ss.ParameterServer(), 3, 0, "rank 0 (server and worker) of strategy 'parameter-server'"),
    (ss.ParameterServer(), 3, 2, "rank 2 (worker) of strategy 'parameter-server'"),
    (DEDICATED, 3, 0, "rank 0 (server) of strategy 'parameter-server:async, dedicated'"),
    (DEDICATED, 3, 1, "rank 1 (worker) of strategy 'parameter-server:async, dedicated'"),
    (
        ss.ParameterServer(mode="ssp", servers=2), 3, 1,
        "rank 1 (server and worker) of strategy 'parameter-server:ssp, 2 servers'",
    ),
]  # fmt: skip
PIPELINES: list[Kill] = [
    ("pipeline", 3, 0, "rank 0 (stage 0) of strategy 'pipeline:"),
    ("pipeline:1f1b", 3, 2, "rank 2 (stage 2) of strategy 'pipeline:"),
    ("pipeline:zbv", 3, 1, "rank 1 (stages 1 and 4) of strategy 'pipeline:"),
]
MESHES: list[Kill] = [
    (ss.Strategy("mesh", data="ring", tensor=2), 4, 0, "rank 0 "),
    (ss.Strategy("mesh", data="zero-3", tensor=2), 4, 3, "rank 3 "),
]


def a_killed_rank_is_named(strategy: Any, world_size: int, victim: int, who: str) -> None:
    model = "resnet" if strategy == "pipeline:zbv" else "mlp"
    of_text = (
        {"model": "gpt-nano", "data": "python-source"} if getattr(strategy, "is_composite", False) else {}
    )
    batch = ss.Batch(48, micro_batch=4) if str(strategy).startswith("pipeline") else ss.Batch(48)
    fields = {"model": model, "batch": batch, **of_text}
    run = ss.launch(endless_job(strategy=strategy, world_size=world_size, **fields))
    pids = rank_pids(run)
    processes = family(run)
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(ss.RunFailed) as failed:
        run.wait(60)
    sentence = str(failed.value)
    assert sentence.startswith(who), sentence
    assert "was killed by SIGKILL" in sentence
    assert "\n" not in sentence
    assert failed.value.rank == victim
    assert failed.value.step is not None
    assert failed.value.step >= 1
    assert (run.state, run.cause) == ("failed", "killed")
    assert run.summary().steps >= 1
    assert all_gone(processes)


# One test for each family, as only about the cube root of a test's cases run with every change.


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kill", ALL_REDUCE)
def test_a_killed_rank_of_an_all_reduce_is_named(kill: Kill) -> None:
    a_killed_rank_is_named(*kill)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kill", TREES)
def test_a_killed_rank_of_a_tree_is_named(kill: Kill) -> None:
    a_killed_rank_is_named(*kill)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kill", SHARDED)
def test_a_killed_rank_that_holds_a_shard_is_named(kill: Kill) -> None:
    a_killed_rank_is_named(*kill)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kill", SERVERS_AND_GOSSIP)
def test_a_killed_server_worker_or_peer_is_named_with_its_role(kill: Kill) -> None:
    a_killed_rank_is_named(*kill)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kill", PIPELINES)
def test_a_killed_stage_is_named_with_its_stages(kill: Kill) -> None:
    a_killed_rank_is_named(*kill)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kill", MESHES)
def test_a_killed_rank_of_a_mesh_is_named(kill: Kill) -> None:
    a_killed_rank_is_named(*kill)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_all_ranks_of_a_mesh() -> None:
    fields = {"model": "gpt-nano", "data": "python-source", "optimizer": ss.Optimizer("sgd", lr=1e30)}
    run = ss.launch(
        endless_job(strategy=ss.Strategy("mesh", tensor=2), world_size=4, batch=ss.Batch(16), **fields)
    )
    with pytest.raises(ss.RunFailed, match="rank [02] .*the loss became nan with learning rate"):
        run.wait(60)
    assert run.state == "failed"
    assert all_gone([event["pid"] for event in run.events("start")])
