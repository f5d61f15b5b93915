"""The simulated column of `ss.compare`: what it holds, and when it is absent."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from shardscope.measure.compare.comparison import ComparedTerm, Comparison
from shardscope.measure.compare.rows import with_simulation

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


def test_an_axis_of_a_mesh_takes_as_long_as_its_collectives() -> None:
    layout = ss.Layout(data=2, tensor=2, zero=1, global_batch=16, micro_batch=4)
    job = ss.Job(model="gpt-nano", data="python-source", layout=layout)
    names = {"ring_reduce_scatter": "data", "ring_all_gather": "data", "all_reduce": "tensor"}
    rows = [ComparedTerm("time", f"{axis} axis", "s", "rank 0", 1.0, 1.0) for axis in ("data", "tensor")]
    rows += [
        ComparedTerm("time", f"{axis}:{name}", "s", "rank 0", 1.0, 1.0, part_of=f"{axis} axis")
        for name, axis in names.items()
    ]
    found = {row.term: row.simulated or 0.0 for row in with_simulation(rows, ss.predict(job), [], per="step")}
    assert found["tensor axis"] == found["tensor:all_reduce"] > 0
    assert found["data axis"] == pytest.approx(
        found["data:ring_reduce_scatter"] + found["data:ring_all_gather"]
    )
    assert found["data axis"] > 0


def rows_of(prediction: Any, group: Any) -> list[ComparedTerm]:
    """Rows that the prediction fills, as if all had been measured as predicted."""
    if group == "memory":
        values = {kind: float(each.max()) for kind, each in prediction.kinds.items() if each.any()}
        values["peak"] = max(term.value for term in prediction.by_rank)
    else:
        values = {name: float(getattr(sent, group).sum()) for name, sent in prediction.traffic.items()}
        values["all collectives"] = sum(values.values())
    return [
        ComparedTerm(group, name, group, "all ranks", value, value) for name, value in values.items() if value
    ]


@pytest.mark.parametrize("strategy", ["ring", "zero-3", "tree", "parameter-server", "pipeline"])
def test_the_messages_of_a_simulated_step_carry_the_predicted_bytes(strategy: str) -> None:
    prediction = ss.predict(job_of(strategy=strategy))
    for group in ("bytes", "messages"):
        found = list(with_simulation(rows_of(prediction, group), prediction, [], per="step"))
        known = {row.term: (row.simulated, row.predicted) for row in found if row.predicted}
        assert known
        for simulated, predicted in known.values():
            assert simulated == pytest.approx(predicted)


@pytest.mark.parametrize("strategy", ["ring", "zero-3", "pipeline"])
def test_simulated_memory_has_the_predicted_types_and_a_peak_of_its_own(strategy: str) -> None:
    prediction, notes = ss.predict(job_of(strategy=strategy)), list[str]()
    found = {
        row.term: row for row in with_simulation(rows_of(prediction, "memory"), prediction, notes, per="step")
    }
    peak = found.pop("peak")
    assert all(row.simulated == row.predicted for row in found.values())
    assert max(row.predicted for row in found.values()) <= (peak.simulated or 0) <= peak.predicted * 1.001
    assert "at the simulated times" in notes[0]


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


TIMES = [
    ComparedTerm("time", "forward", "s", "rank 0", 4.0, 5.0, 4.0),
    ComparedTerm("time", "communication", "s", "rank 0", 2.0, 5.0, 3.0),
    ComparedTerm("time", "ring_all_gather", "s", "rank 0", 2.0, 5.0, 3.0, part_of="communication"),
    ComparedTerm("time", "idle", "s", "rank 0", 0.0, 0.5, 0.0),
    ComparedTerm("time", "step", "s", "slowest rank", 6.0, 10.0, 7.0),
]


def test_the_terms_of_a_residual_add_up_to_the_difference_of_the_step() -> None:
    compared = Comparison("run", "run", "this machine", tuple(TIMES), ())
    for column, expected_s in (("predicted", 6.0), ("simulated", 7.0)):
        found = compared.residual(column)  # type: ignore[arg-type]
        assert found is not None
        assert (found.expected_s, found.measured_s) == (expected_s, 10.0)
        assert sum(term.difference_s for term in found.terms) == pytest.approx(found.difference_s)
        assert [term.term for term in found.terms] == ["ring_all_gather", "forward", "idle", "rest"]
    first = compared.residual()
    assert first is not None
    assert "4 s longer than predicted (6 s). The largest differences: ring all-gather +3 s" in first.sentence


def test_a_residual_needs_a_step_with_parts_and_a_known_column() -> None:
    assert Comparison("run", "run", "here", (TIMES[-1],), ()).residual() is None
    assert Comparison("run", "run", "here", (), ()).residual() is None
    with pytest.raises(ss.SpecError, match="use 'predicted' or 'simulated'"):
        Comparison("run", "run", "here", tuple(TIMES), ()).residual("measured")  # type: ignore[arg-type]
