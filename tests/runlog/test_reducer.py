"""The reducer: the same figures however the events arrive, and only steps that all ranks have finished."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from conformance.events import step_event, traffic
from shardscope.measure.compare.measured import slowest_rank_s
from shardscope.runlog.reducer import Evaluation, RunLog
from shardscope.runlog.spans import finished_steps
from shardscope.runlog.steps import Step, StepKinds, per_step
from shardscope.runlog.summary import summarise


def log_of(events: list[dict[str, Any]], world_size: int = 2) -> RunLog:
    log = RunLog(world_size=world_size)
    log.feed(events)
    return log


def a_run(steps: int = 12) -> list[dict[str, Any]]:
    """Events of two ranks with late traffic, measurements and evaluations, each rank's in order."""
    found: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        for rank in (0, 1):
            sent = {**traffic(100 * step + rank), **traffic(7, "noise_scale")}
            noise = {"small_square": step, "large_square": rank}
            fields: dict[str, Any] = {"t": step + rank / 10, "grad_norm": 1.0, "spans": []}
            found.append(step_event(step, rank, traffic=sent, noise=noise, **fields))
            late = {"event": "traffic", "t": step + 0.5, "rank": rank, "step": max(1, step - 2)}
            found.append(late | {"traffic": traffic(3, "server_pull")})
        if step % 4 == 0:
            seen = {"event": "eval", "t": step + 0.6, "step": step, "loss": 1.0 / step, "accuracy": 0.5}
            found += [seen | {"rank": rank, "traffic": traffic(11)} for rank in (0, 1)]
    return found


def test_columns_are_what_all_ranks_did_together() -> None:
    rows = [
        step_event(1, 0, loss=1.0, step_time_s=0.2, samples=3, tokens=30, grad_norm=2.0, memory_bytes=5, lr=0.3,
                   peak_memory_bytes=9, traffic=traffic(10), spans=[["compute", "forward", 0.0, 0.1, 0]]),
        step_event(1, 1, loss=None, step_time_s=0.4, samples=0, tokens=None, grad_norm="inf", memory_bytes=7, lr=0.5,
                   peak_memory_bytes=8, traffic=traffic(20, messages=4), codec_s=0.05, skipped=True, spans=[]),
    ]  # fmt: skip
    (step,) = log_of(rows).steps
    assert step == Step(1, 1.0, 1.0, 0.4, 3, 30, 0.3, math.inf, 30, 5, 7, 9, 0.05, 0.1, 1, 0.0, 2)
    assert (step.samples_per_s, step.tokens_per_s) == (pytest.approx(7.5), pytest.approx(75))


def test_a_step_does_not_last_as_long_as_on_a_rank_whose_gradient_was_dropped() -> None:
    """A backup worker that is twice as slow takes two steps' time for one, and then skips one."""
    rows = [
        step_event(step, rank, t=step + rank, step_time_s=seconds, dropped=rank == 1)
        for step in range(1, 9)
        for rank, seconds in enumerate((1.0, 0.001 if step % 2 else 2.0))
    ]
    log = log_of(rows)
    assert log.step_time_s == 1.0
    assert log.steps.column("step_time_s").tolist() == [1.0] * 8
    assert log.steps.column("t").tolist() == [*range(1, 9)]
    assert slowest_rank_s(finished_steps(rows, 2)) == 1.0


def test_a_step_that_no_rank_was_awaited_in_still_has_a_duration() -> None:
    (step,) = log_of([step_event(1, rank, t=3.0, step_time_s=0.5, dropped=True) for rank in (0, 1)]).steps
    assert (step.t, step.step_time_s) == (3.0, 0.5)


@given(st.integers(0, 1000))
def test_figures_are_the_same_however_events_arrive(seed: int) -> None:
    dice, events = random.Random(seed), a_run()
    queues = [[event for event in events if event["rank"] == rank] for rank in (0, 1)]
    log, whole = RunLog(world_size=2), log_of(events)
    while any(queues):
        own = dice.choice([queue for queue in queues if queue])
        log.feed([own.pop(0) for _ in range(min(len(own), dice.randint(1, 5)))])
    assert [*log.steps] == [*whole.steps]
    assert {**vars(log), "steps": None} == {**vars(whole), "steps": None}
    late = {1: 18, 11: 0, 12: 0}
    sent = [200 * step + 1 + late.get(step, 6) for step in range(1, 13)]
    assert whole.steps.column("sent_bytes").tolist() == sent
    assert whole.observing == {"noise_scale": 2 * 12 * 7, "eval": 2 * 3 * 11}
    assert whole.evaluations[-1] == Evaluation(12, 1 / 12, 0.5)
    assert whole.collectives.total() == sum(whole.steps.column("sent_bytes"))
    assert whole.noise[3] == (3, 0.5)


def test_a_step_counts_once_all_ranks_have_finished_it() -> None:
    log = log_of([step_event(1, 0), step_event(1, 1), step_event(2, 0), step_event(3, 0)])
    assert (log.last_step, log.peak_memory) == (1, {0: 1, 1: 1})
    log.feed([step_event(2, 1)])
    assert log.last_step == 2


def test_steps_that_a_restarted_run_takes_again_replace_the_earlier_ones() -> None:
    first = [step_event(n, rank, loss=1.0) for n in (1, 2, 3) for rank in (0, 1)] + [
        step_event(4, 0, loss=1.0)
    ]
    starts = [{"event": "start", "t": 5.0, "rank": rank, "strategy": "ring"} for rank in (0, 1)]
    again = [step_event(n, rank, loss=2.0) for n in (2, 3, 4) for rank in (1, 0)]
    log = log_of(first + starts + again)
    assert log.steps.column("number").tolist() == [1, 2, 3, 4]
    assert log.steps.column("loss").tolist() == [1.0, 2.0, 2.0, 2.0]


def test_a_resumed_run_is_averaged_over_the_kinds_of_steps_that_it_took() -> None:
    kinds = StepKinds(uncompressed=4)
    assert per_step([1, 2, 3, 4], [8.0] * 4, kinds, until=8) is None, "nothing is known of compressed steps"
    assert per_step([1, 2, 3, 4, 5], [8.0] * 4 + [2.0], kinds, until=12) == pytest.approx(
        (4 * 8 + 8 * 2) / 12
    )
    assert per_step([4, 5, 6, 7], [8.0, 2.0, 2.0, 2.0], kinds) == pytest.approx((8 + 3 * 2) / 4)
    assert per_step([6, 7], [2.0, 2.0], kinds) == 2.0
    assert per_step([1, 2, 3], [math.nan, math.nan, 5.0]) == 5.0


@pytest.mark.parametrize(
    "seconds", [(1.0, 1.0), (1.0, 4.0), (0.5, 3.0), (1.0, 1.0, 6.0), (0.25, 1.0, 2.0, 8.0)]
)
@pytest.mark.parametrize("budget", ["shared", "per-worker"])
def test_the_rate_of_asynchronous_workers_is_the_sum_of_theirs(
    seconds: tuple[float, ...], budget: str
) -> None:
    """Each takes its own time for a gradient, and starts again without waiting."""
    job = ss.Job(
        model="mlp", data="digits", strategy=ss.ParameterServer(mode="async", budget=budget),
        world_size=len(seconds), batch=4 * len(seconds), steps=400,
    )  # fmt: skip
    log, rate = RunLog.of(job), sum(4 / each for each in seconds)
    turns = shared_turns(seconds, 400) if budget == "shared" else [[1] * 400 for _ in seconds]
    for rank, (each, counts) in enumerate(zip(seconds, turns, strict=True)):
        fields = [{"gradients": count} if budget == "shared" else {} for count in counts]
        log.feed(
            step_event(step, rank, samples=4 * count, step_time_s=max(count * each, 1e-6), **more)
            for step, (count, more) in enumerate(zip(counts, fields, strict=True), start=1)
        )
    summary = summarise(log, "completed", job)
    assert summary.steps == 400
    assert summary.samples_per_s == pytest.approx(rate, rel=0.01)


def shared_turns(seconds: tuple[float, ...], steps: int) -> list[list[int]]:
    """How many gradients of each step each worker takes, if the one that is ready first takes the next."""
    ready, turns = [0.0] * len(seconds), [[0] * steps for _ in seconds]
    for number in range(steps * len(seconds)):
        worker = ready.index(min(ready))
        ready[worker] += seconds[worker]
        turns[worker][number // len(seconds)] += 1
    return turns
