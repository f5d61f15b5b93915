"""Following a run's figures while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.runtime.layers import Looks
from shardscope.runtime.run import Run
from shardscope.runtime.rundir import RunDir
from shardscope.training.events import encode
from shardscope.tuning.measured import Meter

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


def test_alarms_are_looked_for_ever_rarer_and_once_more_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []
    layers = Looks.layers

    def counted(looks: Looks, optimizer: str) -> Any:
        judged.append(looks.num_looks)
        return layers(looks, optimizer)

    monkeypatch.setattr(Looks, "layers", counted)
    run = RunDir.create(JOB, tmp_path)
    meter = Meter(Run(run))
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
    meter = Meter(Run(run))

    def take(step: int, seconds: float) -> float | None:
        for rank in range(2):
            event = {
                "event": "step", "t": float(step), "step": step, "rank": rank, "step_time_s": seconds, "traffic": {},
                "peak_memory_bytes": 1, "memory_bytes": 1, "loss": 1.0, "samples": 4, "tokens": None, "lr": 0.1,
                "grad_norm": None,
            }  # fmt: skip
            with run.rank_file(rank).open("ab") as file:
                file.write(encode(event))
        return meter.poll().step_s

    first = [take(step, seconds) for step, seconds in enumerate((9.0, 9.0, 1.0, 1.0), 1)]
    assert first == [None] * 4, "nothing is known of compressed steps"
    assert take(5, 0.25) == take(6, 0.25) == pytest.approx((4 * 1.0 + 16 * 0.25) / 20)
    assert meter.poll().spent_s == pytest.approx(20.5)
    assert Meter(Run(run), is_piece=True).poll().step_s == pytest.approx(0.625), "the median of what it has"
