"""Epochs of a run on shards, reduced from the events of its ranks."""

from __future__ import annotations

import pytest

from shardscope.runlog.reducer import RunLog
from shardscope.runlog.schema import is_readable
from shardscope.runlog.summary import summarise


def step(number, rank, epoch=None, shards=None, seconds=0.5):
    told = {"epoch": epoch} if epoch is not None else {}
    return {
        "event": "step", "rank": rank, "t": float(number), "step": number, "loss": 1.0, "samples": 4, "tokens": None,
        "step_time_s": seconds, "lr": 0.1, "grad_norm": None, "memory_bytes": 1, "peak_memory_bytes": 1, "traffic": {},
        **told, **({} if shards is None else {"shards": shards}),
    }  # fmt: skip


def test_counts_are_summed_over_ranks_and_times_are_those_of_the_slowest():
    log = RunLog(world_size=2)
    log.feed([
        step(1, 0, 0, [[0, 4, 0, 100]], seconds=0.2), step(1, 1, 0, [[0, 4, 4, 0]], seconds=0.3),
        step(2, 0, 0, [[1, 2, 2, 0]], seconds=0.1), step(2, 1, 0, seconds=0.1),
        step(3, 0, 1, seconds=0.1), step(3, 1, 1, [[1, 2, 1, 50]], seconds=0.01),
    ])  # fmt: skip
    first, second = log.epochs[0], log.epochs[1]
    assert (first.hit_rate, first.fetched_bytes, first.step_time_s) == (0.5, 100, pytest.approx(0.2))
    assert (second.hit_rate, second.fetched_bytes, second.step_time_s) == (0.75, 50, 0.1)
    summary = summarise(log, "running")
    assert summary.cache_hit_rate == pytest.approx(7 / 12)
    assert summary.fetched_bytes == 150


def test_other_runs_have_no_epochs():
    log = RunLog(world_size=1)
    log.feed([step(1, 0)])
    assert not log.epochs
    assert (summarise(log, "running").cache_hit_rate, summarise(log, "running").fetched_bytes) == (None, None)


@pytest.mark.parametrize("shards", [[[0, 1, 1]], [[0, 1, 1, -1]], "none", [[0, 1, 1, 0.5]]])
def test_damaged_counts_are_dropped_with_their_event(shards):
    assert is_readable(step(1, 0, 0, [[0, 1, 1, 0]]))
    assert not is_readable(step(1, 0, 0, shards))
