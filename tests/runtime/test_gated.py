"""Gated runs: ranks wait for approval after each evaluation, and never for long."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import shardscope as ss
from conformance.runs import small_job
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.agent.control import NoVerdictError, StopControl, StoreNotes
from shardscope.runtime.record.rundir import RunDir
from shardscope.training.context import open_rank
from shardscope.training.trainer import Trainer


def patient() -> Callable[[], nn.Module]:
    """A model; where it is built, decisions are waited for however long they take."""

    def build() -> nn.Module:  # inside, so that ranks get it whole and need not find this file
        from shardscope.runtime.agent.control import StopControl

        whole = StopControl.evaluated
        StopControl.evaluated = lambda self, step, _: whole(self, step, 100.0)  # type: ignore[method-assign]
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    return build


def judge(run: ss.Run, decide: Callable[[int], bool]) -> None:
    """Let it go on after each evaluation of which that is decided, and stop it after the first other one."""
    seen = 0
    while run.is_alive:
        evals = [event["step"] for event in run.events("eval", rank=0)]
        if evals and evals[-1] > seen:
            seen = evals[-1]
            if not decide(seen):
                run.stop()
                return
            run.approve(seen)
        time.sleep(0.002)


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_stop_after_an_evaluation_costs_no_further_step(world_size: int) -> None:
    strategy = "single" if world_size == 1 else "ring"
    job = small_job(
        model=patient(), strategy=strategy, world_size=world_size, batch=12, steps=6, eval_every=1
    )
    run = ss.launch(job, gated=True)
    judge(run, lambda step: step < 2)
    assert run.error is None
    assert run.state == "stopped"
    assert {end["steps"] for end in run.events("end")} == {2}
    assert {event["step"] for event in run.events("step")} == {1, 2}


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "parameter-server", "pipeline", "zero-3"])
def test_what_may_go_on_is_trained_as_if_nobody_decided(strategy: str) -> None:
    job = small_job(strategy=strategy, steps=12, eval_every=3)
    alone, gated, unanswered = ss.launch(job), ss.launch(job, gated=True), ss.launch(job, gated=True)
    judge(gated, lambda step: True)
    runs = [run.wait(60) for run in (alone, gated, unanswered)]
    assert [run.state for run in runs] == ["completed"] * 3
    curves = [[event["loss"] for event in run.events("eval", rank=0)] for run in runs]
    assert curves[0] == curves[1] == curves[2]


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["gossip", "parameter-server:async"])
def test_ranks_that_are_not_in_step_do_not_wait(strategy: str) -> None:
    job = small_job(strategy=strategy, world_size=3, batch=12, steps=8, eval_every=2)
    run = ss.launch(job, gated=True).wait(60)
    assert run.state == "completed"
    assert not RunDir(run.path).decision.exists()


def test_a_gate_without_evaluations_is_refused() -> None:
    with pytest.raises(ss.SpecError, match="gated=True has no effect on a job with eval_every=None"):
        ss.launch(small_job(), gated=True)
    assert not ss.runs()
    with pytest.raises(ss.SpecError, match="does not wait for approval; launch it with gated=True"):
        ss.launch(small_job(steps=1)).approve(1)


# The waiting itself.


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "control").mkdir()
    directory = RunDir(tmp_path)
    directory.approve(0)
    return directory


def waits(control: StopControl, step: int, patience_s: float) -> float:
    since = time.monotonic()
    control.evaluated(step, patience_s)
    return time.monotonic() - since


def test_nobody_waits_without_a_gate(run: RunDir) -> None:
    run.approval.unlink()
    for rank in (0, 1):
        StopControl(run, rank, 2).evaluated(1, 1e9)


def test_a_decision_that_is_there_is_not_waited_for(run: RunDir) -> None:
    first, second = StopControl(run, 0, 2), StopControl(run, 1, 2)
    run.approve(4)
    for step in (2, 4):
        first.evaluated(step, 1e9)
        second.evaluated(step, 1e9)
        assert not first.should_stop(step + 1)
        assert not second.should_stop(step + 1)


def test_a_late_decision_is_waited_for_twice_and_no_more(run: RunDir) -> None:
    control = StopControl(run, 0, 2)
    assert waits(control, 1, 0.2) >= 0.2
    run.approve(2)
    control.evaluated(2, 1e9)
    assert waits(control, 3, 0.2) >= 0.2
    assert waits(control, 4, 0.2) >= 0.2
    control.evaluated(5, 1e9)
    assert run.decision.read_text() == "5"


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_stop_after_the_evaluation_if_the_request_comes_while_they_wait(
    run: RunDir, world_size: int
) -> None:
    controls = [StopControl(run, rank, world_size) for rank in range(world_size)]
    threads = [threading.Thread(target=control.evaluated, args=(5, 60.0)) for control in controls]
    for thread in threads:
        thread.start()
    run.request_stop(1.0)
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads)
    assert all(control.should_stop(6) for control in controls)
    assert run.stop_at.read_text() == "5"


def test_ranks_that_see_no_file_of_rank_0_stop_after_the_same_step(run: RunDir, tmp_path: Path) -> None:
    """As on two machines whose shared directory shows a new file to one of them only, for as long as it caches."""
    notes, elsewhere = StoreNotes(dist.HashStore()), RunDir(tmp_path / "elsewhere")
    (elsewhere.path / "control").mkdir(parents=True)
    elsewhere.approve(0)
    first, second = StopControl(run, 0, 2, notes=notes), StopControl(elsewhere, 1, 2, notes=notes)
    run.approve(2)
    for control in (first, second):
        control.evaluated(2, 1e9)
        assert not control.should_stop(3)
    run.request_stop(1.0)
    assert [control.should_stop(step) for step in (4, 5) for control in (first, second)] == [
        False,
        False,
        True,
        True,
    ]


def test_a_rank_that_rank_0_does_not_answer_says_so(run: RunDir) -> None:
    with pytest.raises(
        NoVerdictError, match="rank 0 has not reported for 0 s after the evaluation at step 5; raise"
    ):
        StopControl(run, 1, 2, timeout_s=0.1).evaluated(5, 0.1)


def test_whoever_watches_is_told_of_every_evaluation_on_the_way_and_how_long_its_step_took(
    tmp_path: Path,
) -> None:
    seen: list[tuple[int, float]] = []
    job = small_job(strategy="single", world_size=1, steps=7, eval_every=2)
    with (
        EventWriter(tmp_path / "rank-0.jsonl", 0) as events,
        open_rank(job, events, {"RANK": "0", "WORLD_SIZE": "1"}) as context,
    ):
        trainer = Trainer(job, context, tmp_path)
        trainer.train(StopControl(RunDir(tmp_path), 0, 1), evaluated=lambda *told: seen.append(told))
    lines = map(json.loads, (tmp_path / "rank-0.jsonl").read_text().splitlines())
    took = {line["step"]: line["step_time_s"] for line in lines if line["event"] == "step"}
    assert [step for step, _ in seen] == [2, 4, 6]
    assert all(took[step] <= seconds + 1e-6 for step, seconds in seen)
