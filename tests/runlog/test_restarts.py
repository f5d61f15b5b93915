"""What the reducer makes of faults and restarts: repeated steps replace the earlier ones, and lost ones are counted."""

from __future__ import annotations

from typing import Any

from conformance.events import step_event
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.schema import is_readable
from shardscope.runlog.summary import summarise, summary_from
from shardscope.runlog.tail import of_last_attempt


def start(t: float) -> list[dict[str, Any]]:
    return [{"event": "start", "t": t, "rank": rank, "strategy": "ring"} for rank in (0, 1)]


def steps(first: int, last: int, t: float, loss: float) -> list[dict[str, Any]]:
    return [
        step_event(step, rank, t=t + step - first + 1, loss=loss + step, step_time_s=1.0)
        for step in range(first, last + 1)
        for rank in (0, 1)
    ]


def restart(t: float, step: int, attempt: int = 1) -> dict[str, Any]:
    return {
        "event": "restart", "t": t, "rank": 0, "attempt": attempt, "cause": "rank 1 was killed", "failed_rank": 1,
        "failed_step": 7, "step": step, "source": "disk" if step else "start", "failed_t": t - 0.5,
    }  # fmt: skip


FAULT = {
    "event": "fault",
    "t": 17.5,
    "rank": 1,
    "step": 8,
    "kind": "kill",
    "text": "rank 1 killed",
    "number": 0,
}


def a_recovered_run() -> list[dict[str, Any]]:
    """Steps 1 to 7, a kill in step 8 at 17.5 s, and steps 5 to 10 again from 20 s on."""
    half = [step_event(8, 0, t=18.0, loss=99.0, step_time_s=1.0)]
    evaluation = {"event": "eval", "t": 16.5, "rank": 0, "step": 6, "loss": 5.0, "split": "validation"}
    resumed = {"event": "resume", "t": 19.5, "rank": 0, "step": 4, "samples": 4, "notes": []}
    return [
        *start(10.0), *steps(1, 7, 10.0, loss=0.0), evaluation, FAULT, *half, restart(19.0, step=4), *start(19.6),
        resumed, *steps(5, 10, 20.0, loss=100.0),
    ]  # fmt: skip


def log_of(events: list[dict[str, Any]]) -> RunLog:
    assert all(map(is_readable, events))
    log = RunLog(world_size=2)
    log.feed(events)
    return log


def test_steps_that_are_repeated_replace_the_earlier_ones_and_are_counted() -> None:
    log = log_of(a_recovered_run())
    assert [step.number for step in log.steps] == [*range(1, 11)]
    assert [step.loss for step in log.steps] == [1, 2, 3, 4, 105, 106, 107, 108, 109, 110]
    assert log.lost_steps == 3
    assert not log.evaluations
    (only,) = log.restarts
    assert (only.attempt, only.failed_rank, only.step, only.source, only.lost_steps) == (1, 1, 4, "disk", 3)
    assert (only.failed_t, only.recovered_t, only.took_s) == (18.5, 21.0, 2.5)
    assert log.faults == [FAULT]


def test_goodput_is_the_time_of_the_steps_that_count_over_all_time() -> None:
    log = log_of(a_recovered_run())
    assert log.wall_s == 16.0  # from 10 to 26 s
    assert log.goodput == 10.0 / 16.0
    summary = summarise(log, "completed")
    assert (summary.restarts, summary.lost_steps, summary.goodput, summary.wall_s) == (1, 3, 0.625, 16.0)


def test_a_run_that_begins_anew_loses_all() -> None:
    log = log_of([*start(0.5), *steps(1, 3, 1.0, loss=0.0), restart(5.0, step=0), *start(6.0)])
    assert (len(log.steps), log.lost_steps, log.restarts[0].recovered_t) == (0, 3, None)
    log.feed(steps(1, 1, 7.0, loss=50.0))
    assert [step.loss for step in log.steps] == [51]


def test_an_older_checkpoint_than_the_agent_saw_counts() -> None:
    """The newest one was damaged, and the ranks say which one they have loaded."""
    resumed = {
        "event": "resume",
        "t": 5.5,
        "rank": 0,
        "step": 2,
        "samples": 0,
        "notes": ["step-4 is damaged"],
    }
    log = log_of([*start(0.5), *steps(1, 5, 0.0, loss=0.0), restart(5.2, step=4), *start(5.4), resumed])
    assert (log.last_step, log.lost_steps, log.restarts[0].step, log.restarts[0].lost_steps) == (2, 3, 2, 3)


def test_events_of_the_last_attempt_are_those_since_the_last_restart() -> None:
    events = a_recovered_run()
    assert of_last_attempt(events)[0]["t"] == 19.6
    assert of_last_attempt(events[:5]) == events[:5]


def test_a_summary_of_an_earlier_version_has_no_restarts() -> None:
    old = summary_from({"state": "completed", "steps": 3})
    assert old is not None
    assert (old.restarts, old.lost_steps, old.goodput) == (0, 0, None)


def test_what_the_ranks_went_on_from_counts_and_not_what_the_agent_expected() -> None:
    """The run was launched with resume=..., and failed before its own first checkpoint."""
    resumed = {
        "event": "resume", "t": 5.5, "rank": 0, "step": 40, "samples": 0, "notes": [], "source": "disk",
    }  # fmt: skip
    log = log_of([*start(0.5), *steps(41, 43, 0.0, loss=0.0), restart(5.2, step=0), *start(5.4), resumed])
    (only,) = log.restarts
    assert (only.step, only.source, only.lost_steps, log.lost_steps) == (40, "disk", 3, 3)


def test_a_restart_that_has_recovered_stays_as_it_is() -> None:
    """A resize after it goes on from an older checkpoint, because the newest one is damaged."""
    log = log_of(a_recovered_run())
    log.feed(
        [{"event": "resume", "t": 30.0, "rank": 0, "step": 8, "samples": 0, "notes": [], "source": "disk"}]
    )
    (only,) = log.restarts
    assert (only.step, only.lost_steps) == (4, 3)
    assert (log.last_step, log.lost_steps) == (8, 5)
