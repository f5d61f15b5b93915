"""The log of a run whose number of ranks changes: steps count when all ranks of their time have finished them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.events import step_event, traffic
from shardscope.runlog.frames import metrics_frame
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.resizes import Resize, sizes_text
from shardscope.runlog.spans import finished_steps
from shardscope.runlog.summary import summarise

PERIODS = [(2, range(1, 5)), (4, range(5, 8)), (3, range(8, 10)), (2, range(10, 13))]


def start(rank: int, world_size: int, t: float) -> dict[str, Any]:
    return {"event": "start", "t": t, "rank": rank, "strategy": "ring", "world_size": world_size}


def a_resized_run() -> list[dict[str, Any]]:
    """Events in order of time: each period's ranks start 0.6 s before the end of its first step of 0.1 s."""
    found = []
    for size, steps in PERIODS:
        found += [start(rank, size, steps[0] - 0.6) for rank in range(size)]
        found += [
            step_event(step, rank, traffic=traffic(size), samples=48 // size, memory_bytes=size)
            for step in steps
            for rank in range(size)
        ]
    return found


def a_grown_run_that_failed(*, step: int) -> list[dict[str, Any]]:
    """Two ranks, and four from step 5 on, one of which fails after step 7; training continues from this step."""
    return [
        *a_resized_run()[: (2 + 4 * 2) + (4 + 3 * 4)],
        {
            "event": "restart", "t": 7.4, "failed_t": 7.3, "rank": 0, "attempt": 1, "cause": "rank 1 was killed",
            "failed_rank": 1, "failed_step": 7, "step": step, "source": "disk",
        },
    ]  # fmt: skip


def log_of(events: list[dict[str, Any]]) -> RunLog:
    log = RunLog(world_size=2)
    log.feed(events)
    return log


def test_each_step_knows_its_number_of_ranks() -> None:
    log = log_of(a_resized_run())
    assert list(log.steps.column("number")) == list(range(1, 13))
    assert list(log.steps.column("world_size")) == [2] * 4 + [4] * 3 + [3] * 2 + [2] * 3
    assert set(log.steps.column("samples")) == {48}
    assert list(metrics_frame(log)["world_size"]) == list(log.steps.column("world_size"))
    pause = pytest.approx(0.9)
    assert log.resizes == [Resize(5, 2, 4, pause), Resize(8, 4, 3, pause), Resize(10, 3, 2, pause)]
    assert sizes_text(log.resizes) == "2 → 4 → 3 → 2"


def test_averages_and_the_summary_are_those_since_the_last_resize() -> None:
    events = a_resized_run()
    while events[-1]["step"] > 9:  # the run is still on 3 ranks
        events.pop()
        if events[-1]["event"] == "start":
            events = [event for event in events if event["t"] < 9.3 or event["event"] == "step"]
            break
    log = log_of(events)
    summary = summarise(log, "running")
    assert log.bytes_per_step == 3 * 3
    assert (summary.world_size, summary.world_sizes) == (3, "2 → 4 → 3")
    assert summary.resize_s == pytest.approx(1.8)
    assert set(log.starts) == set(log.peak_memory) == {0, 1, 2}
    assert summary.wall_s == pytest.approx(9 - 0.4)
    assert sorted(finished_steps(events, 2)) == [8, 9]


@given(st.lists(st.floats(-0.19, 0.19), min_size=4, max_size=4))
def test_the_clocks_of_machines_may_differ_by_less_than_ranks_need_to_start(skews: list[float]) -> None:
    events = [event | {"t": event["t"] + skews[event["rank"]]} for event in a_resized_run()]
    log = log_of(sorted(events, key=lambda event: event["t"]))
    assert list(log.steps.column("number")) == list(range(1, 13))
    assert [each[:3] for each in log.resizes] == [(5, 2, 4), (8, 4, 3), (10, 3, 2)]


def test_ranks_that_died_in_mid_step_do_not_count_for_those_that_repeat_it() -> None:
    died = [start(rank, 3, 0.0) for rank in range(3)] + [
        step_event(step, rank) for step in (1, 2, 3) for rank in range(3) if (step, rank) != (3, 1)
    ]
    again = [start(rank, 2, 3.5) for rank in range(2)] + [
        step_event(step, rank, t=step + 2.0) for step in (2, 3) for rank in range(2)
    ]
    log = log_of(died + again)
    assert list(log.steps.column("number")) == [1, 2, 3]
    assert list(log.steps.column("world_size")) == [3, 2, 2]
    assert log.world_size == 2


def test_a_restart_on_fewer_ranks_is_no_resize_that_took_time() -> None:
    again = [start(rank, 3, 7.6) for rank in range(3)] + [
        step_event(step, rank, t=step + 2.0) for step in (6, 7) for rank in range(3)
    ]
    log = log_of([*a_grown_run_that_failed(step=5), *again])
    before, after = log.resizes
    assert (before.pause_s, before.is_failure) == (pytest.approx(0.9), False)
    assert (after.step, after.before, after.after, after.is_failure) == (6, 4, 3, True)
    assert after.pause_s == pytest.approx(8.0 - 0.1 - 7.3)  # not since step 5
    summary = summarise(log, "running")
    assert (summary.world_sizes, summary.resize_s) == ("2 → 4 → 3", pytest.approx(0.9))


def test_a_resize_keeps_its_time_if_its_first_step_is_repeated() -> None:
    again = [start(rank, 4, 7.6) for rank in range(4)] + [step_event(5, rank, t=8.0) for rank in range(4)]
    log = log_of([*a_grown_run_that_failed(step=4), *again])
    assert log.resizes == [Resize(5, 2, 4, pytest.approx(0.9))]


def test_a_run_of_one_size_has_no_resizes() -> None:
    log = log_of([start(0, 2, 0.0), start(1, 2, 0.0), step_event(1, 0), step_event(1, 1)])
    assert log.resizes == []
    assert summarise(log, "running").world_sizes is None


def test_ranks_that_fell_back_to_an_older_checkpoint_say_so() -> None:
    def resumed(step: int, source: str) -> list[dict[str, Any]]:
        at = {"t": step + 0.5, "rank": 0, "step": step, "source": source}
        return [at | {"event": "resume", "samples": 0, "notes": []}, at | {"event": "resize"}]

    def taken(steps: range, size: int, t: float) -> list[dict[str, Any]]:
        return [step_event(step, rank, t=t + step) for step in steps for rank in range(size)]

    events = [start(rank, 2, 0.0) for rank in range(2)] + taken(range(1, 9), 2, 0.0)
    events += [start(rank, 3, 8.4) for rank in range(3)] + resumed(8, "replica") + taken(range(9, 13), 3, 0.0)
    events += [start(rank, 4, 12.4) for rank in range(4)] + resumed(10, "disk") + taken(range(11, 14), 4, 3.0)
    log = log_of(events)
    assert list(log.steps.column("number")) == list(range(1, 14))
    found = [(each.step, each.before, each.after, each.source) for each in log.resizes]
    assert found == [(9, 2, 3, "replica"), (11, 3, 4, "disk")]
    assert log.lost_steps == 2
