"""Stragglers in the log: named if they compute longer step after step, and not if they wait or are slow in turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import shardscope as ss
from conformance.events import step_event
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.steps import WARM_UP_STEPS
from shardscope.runlog.stragglers import Straggler

Seconds = Callable[[int, int], dict[str, float]]
"""Seconds of each phase, of a step and a rank."""


def log_of(
    seconds: Seconds,
    ranks: int = 4,
    steps: int = 16,
    job: ss.Job | None = None,
    **fields: Callable[[int], Any],
) -> RunLog:
    log = RunLog(world_size=ranks) if job is None else RunLog.of(job)
    for step in range(1, steps + 1):
        rows = []
        for rank in range(ranks):
            at, spans = float(step), []
            for phase, length in seconds(step, rank).items():
                spans.append(["compute", phase, at, at + length, 0])
                at += length
            rows.append(
                step_event(step, rank, spans=spans, **{name: of(rank) for name, of in fields.items()})
            )
        log.feed(rows)
    return log


def found(log: RunLog) -> Straggler:
    assert log.straggler is not None
    return log.straggler


def passes(forward: float, backward: float) -> dict[str, float]:
    return {"data": 0.001, "forward": forward, "backward": backward, "optimizer": 0.002}


def test_the_sentence_names_rank_phase_factor_wait_and_remedy() -> None:
    log = log_of(lambda _, rank: passes(0.09 if rank == 3 else 0.05, 0.1), job=job_with("ring"))
    alarm = found(log)
    assert (alarm.rank, alarm.phase) == (3, "forward")
    assert alarm.slower == pytest.approx(1.8)
    assert alarm.wait_s == pytest.approx(0.04)
    assert alarm.text.startswith(
        "rank 3 is 1.8 times slower in forward than the others; the others wait 40 ms a step for it"
    )
    assert "shares='measured'" in alarm.text


def test_of_two_ranks_the_other_one_waits() -> None:
    log = log_of(lambda _, rank: passes(0.09 if rank == 1 else 0.05, 0.1), ranks=2)
    assert "slower in forward than the other; the other waits 40 ms a step for it" in found(log).text


def job_with(strategy: Any, **batch: Any) -> ss.Job:
    return ss.Job(
        model="mlp", data="digits", strategy=strategy, world_size=4, batch=ss.Batch(32, **batch), steps=16
    )


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (job_with(ss.ParameterServer(mode="async")), "the others do not wait for it: with mode='async', its gradients"),
        (job_with(ss.ParameterServer(backups=1)), "the others do not wait for it: with backups=1, updates drop its"),
        (job_with(ss.ParameterServer(mode="ssp")), "the others wait 40 ms a step for it"),
        (job_with("gossip"), "the others wait 40 ms a step for it"),
        (job_with("ring", shares="measured"), "the others wait 40 ms a step for it"),
    ],
)  # fmt: skip
def test_waiting_and_remedy_are_those_of_the_strategy(job: ss.Job, said: str) -> None:
    """Nothing is suggested that the job would refuse, or has already."""
    alarm = found(log_of(lambda _, rank: passes(0.09 if rank == 3 else 0.05, 0.1), job=job))
    assert said in alarm.text
    assert alarm.wait_s == pytest.approx(0.04 if "others wait" in said else 0.0)
    assert alarm.text.endswith("; free its processor")


def test_a_rank_that_only_waits_is_not_slow() -> None:
    """Rank 0 waits for the others within its passes: its spans are long, and its computation is not."""
    log = log_of(
        lambda _, rank: passes(0.15 if rank == 0 else 0.05, 0.1),
        waited=lambda rank: {"forward": 0.1 if rank == 0 else 0.0},
    )
    assert log.straggler is None


@pytest.mark.parametrize("sigma", [0.1, 0.2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_raises_no_alarm(ranks: int, sigma: float) -> None:
    """Ranks whose passes vary by 10 or 20 % from step to step, in a hundred runs as soon as they have enough steps."""
    dice = random.Random(ranks)
    logs = (
        log_of(lambda *_: passes(0.05 * dice.gauss(1, sigma), 0.1 * dice.gauss(1, sigma)), ranks)
        for _ in range(100)
    )
    assert [log.straggler for log in logs if log.straggler is not None] == []


def test_a_rank_that_is_slow_once_or_ranks_in_turn_raise_no_alarm() -> None:
    assert log_of(lambda step, rank: passes(1.0 if (step, rank) == (7, 2) else 0.05, 0.1)).straggler is None
    assert log_of(lambda step, rank: passes(0.2 if step % 4 == rank else 0.05, 0.1)).straggler is None


def test_few_steps_are_no_evidence_and_twelve_are() -> None:
    def is_named(steps: int) -> bool:
        return log_of(lambda _, rank: passes(0.05, 0.1 * (1 + rank)), 2, steps).straggler is not None

    assert [is_named(WARM_UP_STEPS + steps) for steps in (5, 11, 12)] == [False, False, True]


def test_a_straggler_is_found_in_noise_and_forgotten_when_it_recovers() -> None:
    dice = random.Random(0)

    def seconds(step: int, rank: int) -> dict[str, float]:
        slow = 2.0 if rank == 1 and step <= 30 else 1.0
        return passes(0.05 * slow * dice.gauss(1, 0.1), 0.1 * slow * dice.gauss(1, 0.1))

    assert found(log_of(seconds, steps=30)).rank == 1
    assert log_of(seconds, steps=100).straggler is None


def test_a_slow_stage_is_the_bottleneck() -> None:
    log = log_of(lambda _, rank: passes(0.05 + 0.05 * (rank == 2), 0.1))
    log.starts = {rank: {"role": f"stage {rank}"} for rank in range(4)}
    assert found(log).text.startswith("stage 2 (rank 2) is the bottleneck: it is 2 times slower in forward")
    assert "split=" in found(log).text


def test_a_server_is_no_straggler_for_its_updates() -> None:
    log = log_of(lambda _, rank: passes(0.05, 0.1) | ({"server_update": 0.5} if rank == 0 else {}))
    assert log.straggler is None


def test_slow_data_has_its_own_remedy() -> None:
    log = log_of(lambda _, rank: passes(0.05, 0.1) | {"data": 0.2 if rank == 1 else 0.001})
    assert (found(log).phase, "data source" in found(log).text) == ("data", True)


def test_a_rank_with_more_samples_is_told_so() -> None:
    log = log_of(
        lambda _, rank: passes(0.05, 0.1 + 0.1 * (rank == 0)), samples=lambda rank: 8 if rank == 0 else 4
    )
    assert "with 8 samples instead of 4" in found(log).text


def test_the_loss_is_the_mean_over_samples() -> None:
    log = log_of(
        lambda *_: passes(0.05, 0.1),
        ranks=2,
        samples=lambda rank: 3 if rank else 1,
        loss=float,
    )
    assert log.loss == pytest.approx(0.75)
