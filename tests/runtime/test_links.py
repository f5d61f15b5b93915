"""Real jobs on a link: one of every family trains to the same bits, no faster than its bytes allow."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import shardscope as ss
from conformance.runs import all_gone, endless_job, family, small_job, wait_for

LINK = ss.Link(bandwidth="200 Mbit/s", latency="1 ms")
CRAWL = ss.Link(bandwidth="10 kbit/s", latency="1 ms")
FAMILIES: list[Any] = [
    "all-reduce",
    "ring",
    "tree",
    "gossip",
    ss.ParameterServer(servers=2),
    "zero-1",
    ss.Zero2(collectives="backend"),
    "zero-3",
    "pipeline:1f1b",
]


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", FAMILIES, ids=str)
def test_a_job_on_a_link_trains_to_the_same_bits_no_faster_than_its_bytes_allow(strategy: Any) -> None:
    job = small_job(strategy=strategy, steps=4, record=ss.Record(parameters=True))
    runs = [ss.launch(job), ss.launch(job.replace(link=LINK))]
    plain, slowed = (run.wait(60) for run in runs)
    assert slowed.summary().loss == plain.summary().loss
    ours, theirs = (np.load(run.path / "parameters.npz") for run in (slowed, plain))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    for rank in range(2):
        steps = [run.events("step", rank=rank) for run in (slowed, plain)]
        assert [e["traffic"] for e in steps[0]] == [e["traffic"] for e in steps[1]]
        sent = sum(row["sent_bytes"] for event in steps[0] for row in event["traffic"].values())
        assert sum(event["step_time_s"] for event in steps[0]) >= sent / LINK.bandwidth
    assert slowed.summary().link == "200 Mbit/s, 1 ms"
    assert plain.summary().link is None


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "all-reduce", "parameter-server"])
def test_a_rank_killed_while_its_message_crawls_ends_the_run_at_once(strategy: str) -> None:
    run = ss.launch(endless_job(strategy=strategy, link=CRAWL))  # a step would take more than two minutes
    wait_for(lambda: len(run.events("start")) == 2, run)
    pids, processes = {event["rank"]: event["pid"] for event in run.events("start")}, family(run)
    time.sleep(0.2)
    started = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ss.RunFailed, match="rank 1 .*was killed by SIGKILL before its first step"):
        run.wait(60)
    assert time.monotonic() - started < 60
    assert all_gone(processes)


def test_a_link_too_fast_to_be_made_up_is_said_to_be() -> None:
    run = ss.launch(small_job(steps=2, link="100GbE")).wait(60)
    assert run.events("start")[0]["link"]["is_accurate"] is False
    assert "above 5 Gbit/s" in (run.summary().link_note or "")
