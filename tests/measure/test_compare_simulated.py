"""The simulated column of `ss.compare`: what it holds, and when it is absent."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from shardscope.measure.compare.comparison import ComparedTerm
from shardscope.measure.compare.simulated import with_simulation

ROWS = [
    ComparedTerm("time", name, "s", "rank 0", 1.0, 1.0)
    for name in ("forward", "communication", "ring_all_reduce", "codec", "step")
]


def job_of(**settings: Any) -> ss.Job:
    usual = {"model": "mlp", "data": "digits", "strategy": "ring", "world_size": 4}
    return ss.Job(**usual | settings)


def test_times_are_those_of_a_simulated_step() -> None:
    job, notes = job_of(), list[str]()
    found = {row.term: row.simulated for row in with_simulation(ROWS, ss.predict(job), notes, per="step")}
    time = ss.simulate(job).time
    for name in ("forward", "communication", "ring_all_reduce"):
        assert found[name] == pytest.approx(time[name].value)
    assert found["step"] == pytest.approx(time.value)
    assert found["codec"] == 0.0
    assert notes == []


def test_pipelines_are_simulated_too() -> None:
    rows = list(with_simulation(ROWS, ss.predict(job_of(strategy="pipeline", world_size=2)), [], per="step"))
    assert all(row.simulated is not None for row in rows)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"strategy": "parameter-server:async"}, "need not be in the same step"),
        ({"compression": ss.Compression("local-sgd", every=4)}, "the steps of a period differ"),
    ],
)
def test_a_job_that_cannot_be_simulated_has_no_column_and_a_note(settings: dict[str, Any], why: str) -> None:
    notes: list[str] = []
    rows = list(with_simulation(ROWS, ss.predict(job_of(**settings)), notes, per="step"))
    assert all(row.simulated is None for row in rows)
    assert why in notes[0]
