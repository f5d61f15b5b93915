"""Faults of nodes and links on emulated clusters, and runs that recover from them."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

import shardscope as ss
from conformance.emulated import host_traces, needs_namespaces
from conformance.runs import all_gone, family, losses, small_job, wait_for

pytestmark = pytest.mark.slow
PAIR = ss.Cluster.emulated(nodes=2, bandwidth="1 Gbit/s")
WITHIN_S = 120


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    needs_namespaces()


@pytest.mark.parametrize("victim", ["node=0", "rank=1"])
def test_a_killed_node_or_rank_is_started_again_in_its_namespace(victim: str) -> None:
    job = small_job(steps=9, checkpoint=ss.Checkpoint(every=4), recovery=1)
    before = host_traces()
    run = ss.launch(job, PAIR, faults=f"kill {victim} step=7")
    wait_for(lambda: run.events("step"), run)
    processes = family(run)
    run.wait(WITHIN_S)
    assert run.state_text == "completed after 1 restart"
    assert losses(run) == losses(ss.launch(job, PAIR).wait(WITHIN_S))
    (event,) = run.events("restart")
    assert event["step"] == 4
    assert run.summary().lost_steps <= 2
    assert all_gone(processes)
    assert host_traces() == before


@pytest.mark.parametrize("link", ["n1", "n0-n1"])
def test_a_dropped_link_holds_all_up_until_it_is_back(link: str) -> None:
    job = small_job(steps=9)
    run = ss.launch(job, PAIR, faults=ss.Faults().drop_link(link, step=5, lasts="1 s")).wait(WITHIN_S)
    assert losses(run) == losses(ss.launch(job, PAIR).wait(WITHIN_S))
    (event,) = run.events("fault")
    assert event["rank"] == int(link[1])
    ends = [event["t"] for event in run.events("step", rank=0)]
    longest = max(after - before for before, after in pairwise(ends))
    assert longest >= 0.9
    assert run.restarts == 0


def test_a_slow_node_slows_its_steps_by_the_stated_factor() -> None:
    """Steps that compute for 50 ms take 150 ms on the slow node, and everyone waits for it."""
    cluster = ss.Cluster.emulated(nodes=2, flops="40 MFLOP/s")
    job = small_job(steps=12, batch=32)
    run = ss.launch(job, cluster, faults=ss.Faults().slow(node=1, factor=3, steps=(7, 12))).wait(WITHIN_S)
    times = run.metrics().set_index("step")["step_time_s"]
    usual, slow = median(times.loc[3:6]), median(times.loc[8:12])
    assert usual > 0.02
    assert 2.0 < slow / usual < 4.0
