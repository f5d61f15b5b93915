"""The costs of a run, taken from logs whose times are known."""

from __future__ import annotations

from typing import cast

import pytest

import shardscope as ss
from shardscope.analytic import failing_runs
from shardscope.analytic.failing_runs import FailingRun, simulated_s
from shardscope.measure.goodput import costs_of
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.schema import Event

STEP_S, BETWEEN_S, SAVE_S = 0.5, 0.1, 0.3


class Recorded:
    """A run that consists of its events."""

    id, faults = "recorded", ss.Faults()

    def __init__(self, events: list[Event]) -> None:
        self._events = sorted(events, key=lambda event: event["t"])

    def events(self) -> list[Event]:
        return self._events

    def reduced(self) -> RunLog:
        log = RunLog(world_size=2)
        log.feed(self._events)
        return log


def started(t: float, ranks: int) -> list[Event]:
    return [{"event": "start", "rank": rank, "t": t, "world_size": ranks} for rank in range(ranks)]


def trained(t: float, steps: range, ranks: int, first_s: float) -> list[Event]:
    """Events of steps from time `t` on, the first of which takes longer, with a checkpoint after each fifth."""
    found: list[Event] = []
    for number in steps:
        lasted = first_s if number == steps[0] else STEP_S
        t += lasted
        found += [
            {"event": "step", "rank": rank, "t": t, "step": number, "step_time_s": lasted, "loss": 1.0,
             "samples": 8, "tokens": None, "lr": 0.1, "grad_norm": None,
             "traffic": {}, "spans": [], "memory_bytes": 0, "peak_memory_bytes": 0}
            for rank in range(ranks)
        ]  # fmt: skip
        if number % 5 == 0:
            t += SAVE_S
            found.append({"event": "checkpoint", "rank": 0, "t": t, "step": number, "seconds": SAVE_S})
        t += BETWEEN_S
    return found


def test_setup_ends_with_the_first_step_and_a_restart_with_usual_ones() -> None:
    """Rank 1 dies at 120 s; the run goes on from step 15 at 125 s, and a third rank joins it at 200 s."""
    restart: Event = {"event": "restart", "rank": -1, "t": 122.0, "attempt": 1, "cause": "rank 1 was killed",
                      "step": 15, "source": "disk", "failed_t": 121.0}  # fmt: skip
    kill: Event = {
        "event": "fault",
        "rank": 1,
        "t": 120.0,
        "step": 18,
        "number": 0,
        "kind": "kill",
        "text": "",
    }
    run = Recorded(
        [
            *started(100.0, 2), *trained(104.0, range(1, 18), 2, first_s=1.5),
            kill, restart, *started(123.0, 2), *trained(125.0, range(16, 41), 2, first_s=2.5),
            *started(200.0, 3), *trained(203.0, range(41, 61), 3, first_s=1.0),
        ]
    )  # fmt: skip
    costs = costs_of(cast("ss.Run", run))
    assert costs.setup_s == pytest.approx(4.0 + 1.0)
    assert costs.restart_s == pytest.approx(5.0 + 2.0)
    assert (costs.save_s, costs.between_s) == pytest.approx((SAVE_S, BETWEEN_S)), (
        "without the pause of the resize"
    )


def test_few_failures_among_many_checkpoints_are_simulated() -> None:
    run = FailingRun(work_s=1e6, interval_s=5, save_s=0, restart_s=1, write_s=2)
    assert 1e6 < simulated_s(run, mtbf_s=50_000, runs=3).mean() < 1.01e6


def test_the_unluckiest_run_may_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failing_runs, "_MOST_FAILURES", 100)
    run = FailingRun(work_s=4, interval_s=4, save_s=0, restart_s=1)
    assert failing_runs._expected_failures(run, 1.0) < 100
    with pytest.raises(ss.SpecError, match="more than 100 failures to finish"):
        simulated_s(run, mtbf_s=1.0)
