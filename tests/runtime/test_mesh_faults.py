"""Faults of ranks that form several axes: all others wait for a slow or paused rank, and a lost one comes back."""

from __future__ import annotations

import os
import signal
from statistics import median
from typing import Any

import pytest

import shardscope as ss
from conformance.emulated import needs_namespaces
from conformance.runs import all_gone, family, freeze, losses, rank_pids

WITHIN_S = 240
SLOW, FACTOR = 1, 3.0


def mesh(data: Any = "ring", **settings: Any) -> ss.Strategy:
    return ss.Strategy("mesh", data=data, **settings)


def job(strategy: ss.Strategy, **changes: Any) -> ss.Job:
    fields: dict[str, Any] = {
        "batch": ss.Batch(16, micro_batch=4),
        "steps": 10,
        "eval_every": None,
        **changes,
    }
    return ss.Job(model="gpt-nano", data="python-source", strategy=strategy, world_size=4, **fields)


@pytest.mark.weekly
@pytest.mark.parametrize(
    "strategy",
    [mesh(tensor=2), mesh("zero-1", tensor=2), mesh(pipeline=2, stages=ss.Pipeline(split="even"))],
    ids=lambda each: each.label,
)
def test_all_wait_for_a_slow_rank_as_long_as_predicted(strategy: ss.Strategy) -> None:
    needs_namespaces()

    def cluster(slowdown: dict[int, float]) -> ss.Cluster:
        rates = {"flops": "1 GFLOP/s", "memory_bandwidth": "2 GB/s"}
        return ss.Cluster.emulated(4, "1 Gbit/s", slowdown=slowdown, **rates)

    ours = job(strategy, steps=20)
    run = ss.launch(ours, cluster({}), faults=ss.Faults().slow(SLOW, factor=FACTOR, steps=(6, None)))
    times = run.wait(WITHIN_S).metrics().set_index("step").step_time_s
    usual, slow = median(times.loc[3:5]), median(times.loc[7:])
    assert slow == pytest.approx(ss.predict(ours, cluster({SLOW: FACTOR})).step_time_s, rel=0.15)
    assert slow > 1.5 * usual
    if ours.strategy.tensor > 1:  # stages differ by nature
        assert run.summary().straggler.startswith("rank 1 (data 0 · tensor 1) is 3 times slower in")


@pytest.mark.weekly
def test_all_wait_for_a_paused_rank_and_go_on() -> None:
    ours = job(mesh(tensor=2), steps=40)
    run = ss.launch(ours)
    pids = rank_pids(run)
    freeze([pids[3]])
    before, paused_s = len(run.events("step")), 2.0
    with pytest.raises(TimeoutError):
        run.wait(paused_s)
    assert len(run.events("step")) - before <= 4  # those of the step in which it was paused
    os.kill(pids[3], signal.SIGCONT)
    run.wait(WITHIN_S)
    assert losses(run) == losses(ss.launch(ours).wait(WITHIN_S))
    longest = {
        event["rank"]: max(event["spans"], key=lambda span: span[3] - span[2])
        for event in sorted(run.events("step"), key=lambda event: event["step_time_s"])
        if "spans" in event
    }
    waits = {rank: name for rank, (lane, name, start, end, _) in longest.items() if end - start >= paused_s}
    assert waits[2] in ("forward", "backward")  # which wait for rank 3 in the sums of layers


@pytest.mark.slow
def test_a_rank_that_stays_paused_is_named_with_its_place() -> None:
    run = ss.launch(job(mesh(tensor=2), steps=100_000, timeout_s=4))
    pids = rank_pids(run)
    everyone = family(run)
    freeze([pids[1]])
    told = r"^rank 1 \(data 0 · tensor 1\) of strategy 'ring\+tensor2' stopped responding after step \d+, and"
    with pytest.raises(ss.RunFailed, match=told):
        run.wait(60)
    assert all_gone(everyone)


@pytest.mark.weekly
@pytest.mark.parametrize(
    "strategy",
    [
        mesh(tensor=2),
        mesh("zero-3", tensor=2, sequence_parallel=True),
        mesh("zero-1", pipeline=2),
        mesh("zero-3", pipeline=2),
        mesh(tensor=2, pipeline=2),
        mesh("zero-2", context=2),
    ],
    ids=lambda each: each.label,
)
def test_a_killed_rank_comes_back_from_a_copy_in_memory(strategy: ss.Strategy) -> None:
    ours = job(strategy, recovery=ss.Recovery(2, replica_every=1))
    run = ss.launch(ours, faults=ss.Faults().kill(1, step=7)).wait(WITHIN_S)
    assert run.state_text == "completed after 1 restart"
    assert losses(run) == losses(ss.launch(ours.replace(recovery=None)).wait(WITHIN_S))
    (event,) = run.events("restart")
    assert (event["source"], event["step"]) in {("replica", 5), ("replica", 6)}
