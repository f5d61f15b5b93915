"""Following a run's figures while it goes on."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import shardscope as ss
from conformance.events import step_event
from shardscope.runlog.layers import LayerSamples
from shardscope.runlog.steps import Steps
from shardscope.runlog.writer import encode
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import RunDir
from shardscope.tuning.driver import Live
from shardscope.tuning.measured import TrialReader
from shardscope.tuning.session import StudySession

JOB = ss.Job(
    model="mlp", data="digits", strategy="single", world_size=1, steps=8, optimizer=ss.Optimizer("lamb")
)  # fmt: skip


def tell(run: RunDir, step: int, ratio: float) -> None:
    event = {
        "event": "layers", "t": float(step), "step": step, "rank": 0, "lr": 0.1, "layer": ["a"], "ratio": [ratio],
        "weight_norm": [1.0], "update_norm": [1.0], "bound": [None], "owed": [],
    }  # fmt: skip
    with run.rank_file(0).open("ab") as file:
        file.write(encode(event))


def timed(step: int, seconds: float, rank: int = 0) -> dict[str, Any]:
    spans = [["compute", "forward", 0.0, seconds / 4, 0]]
    return step_event(step, rank, step_time_s=seconds, codec_s=seconds / 2, spans=spans)


def test_alarms_are_looked_for_ever_rarer_and_once_more_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []
    layers = LayerSamples.layers

    def counted(layer_samples: LayerSamples, optimizer: str) -> Any:
        judged.append(layer_samples.num_samples)
        return layers(layer_samples, optimizer)

    monkeypatch.setattr(LayerSamples, "layers", counted)
    run = RunDir.create(JOB, tmp_path)
    meter = TrialReader(Run(run))
    for step in range(1, 301):
        tell(run, step, 1.0 if step < 300 else float("nan"))
        measured = meter.poll()
    assert judged[:6] == [1, 2, 3, 4, 5, 6]
    assert len(judged) < 30
    assert measured.alarms == ()
    monkeypatch.setattr(Run, "is_alive", False)
    assert "is nan at step 300" in meter.poll().alarms[0]
    assert judged[-1] == 300
    meter.poll()
    assert judged.count(300) == 1, "nothing is new"


def test_steps_before_and_after_a_warm_up_weigh_as_often_as_the_job_has_them(tmp_path: Path) -> None:
    warm = ss.Compression("powersgd", warmup_steps=4)
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=20, compression=warm)
    run = RunDir.create(job, tmp_path)
    meter = TrialReader(Run(run))

    def take(step: int, seconds: float) -> float | None:
        for rank in range(2):
            event = timed(step, seconds, rank)
            with run.rank_file(rank).open("ab") as file:
                file.write(encode(event))
        return meter.poll().step_s

    first = [take(step, seconds) for step, seconds in enumerate((9.0, 9.0, 1.0, 1.0), 1)]
    assert first == [None] * 4, "nothing is known of compressed steps"
    assert take(5, 0.25) == take(6, 0.25) == pytest.approx((4 * 1.0 + 16 * 0.25) / 20)
    assert meter.poll().spent_s == pytest.approx(20.5)
    piece = TrialReader(Run(run), is_piece=True).poll()
    assert piece.step_s == pytest.approx((4 * 1.0 + 2 * 0.25) / 6), "the steps that it has"
    assert Run(run).summary().step_time_s == piece.step_s, "a summary, too, is about the steps so far"


def test_watching_a_trial_costs_the_same_however_many_steps_it_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(JOB.replace(steps=30_000), tmp_path)
    run.write_status("running", pid=os.getpid(), process_started=process_started())
    steps, polls = 20_000, 50
    seconds = [0.1 + (step * 7919 % 1000) / 1e4 for step in range(1, steps + polls + 1)]
    events = [encode(timed(step, each)) for step, each in enumerate(seconds, 1)]
    run.rank_file(0).write_bytes(b"".join(events[:steps]))
    driver = StudySession.open(JOB, {"optimizer.lr": [1e-3]}, trials=1, name="cheap", baselines=False).driver
    meter = TrialReader(Run(run))
    meter.poll()
    looked_at: list[str] = []
    column = Steps.column
    monkeypatch.setattr(Steps, "column", lambda self, name: looked_at.append(name) or column(self, name))
    trial = driver.study.ask()
    live = driver.live[trial.number] = Live(meter.run, meter, trial, {}, JOB)
    for event in events[steps:]:
        with run.rank_file(0).open("ab") as file:
            file.write(event)
        driver._follow(live)
    assert (meter.num_steps, live.number in driver.live) == (steps + polls, True)
    assert looked_at == [], "nothing asks for a median before an evaluation or the end"
    measured = live.measured
    assert measured.step_s == pytest.approx(median(seconds[2:]))
    assert measured.compute_s == pytest.approx(median(seconds[2:]) / 4)
    assert measured.codec_s == pytest.approx(sum(seconds[2:]) / len(seconds[2:]) / 2)
    assert (measured.plain_s, measured.spent_s) == pytest.approx((median(seconds), sum(seconds)))
    assert measured == TrialReader(Run(run)).poll()
    looked_at.clear()
    assert live.measured is measured
    assert looked_at == [], "the figures of the same steps are computed once"
