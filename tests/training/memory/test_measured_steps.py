"""When a run measures memory by kind, and where it tells."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.runs import small_job


def steps(record: ss.Record, *, first_step: int = 1, last: int) -> list[int]:
    return [step for step in range(first_step, last + 1) if record.measures_memory(step, first_step, last)]


def test_the_third_step_is_measured_and_then_every_fiftieth() -> None:
    assert steps(ss.Record(), last=160) == [3, 50, 100, 150]


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_short_run_measures_its_last_step(last: int) -> None:
    assert steps(ss.Record(), last=last) == [last]


def test_a_resumed_run_counts_from_where_it_goes_on() -> None:
    assert steps(ss.Record(), first_step=41, last=120) == [43, 50, 100]
    assert steps(ss.Record(), first_step=120, last=120) == [120]


def test_measuring_can_be_turned_down() -> None:
    assert steps(ss.Record(memory_every=None), last=500) == [3]
    assert steps(ss.Record(memory_first=0, memory_every=200), last=500) == [200, 400]
    assert steps(ss.Record(memory_first=0, memory_every=None), last=500) == []


def test_a_run_shows_its_memory_as_a_table() -> None:
    record = ss.Record(memory_first=2, memory_every=4)
    run = ss.launch(small_job(steps=9, record=record)).wait(60)
    memory = run.memory()
    assert list(memory.columns) == [
        "rank", "step", "parameters", "gradients", "optimizer", "activations", "gathered", "buffers",
    ]  # fmt: skip
    assert list(zip(memory["step"], memory["rank"], strict=True)) == [
        (2, 0), (2, 1), (4, 0), (4, 1), (8, 0), (8, 1),
    ]  # fmt: skip
    num_params = run.events("start")[0]["num_params"]
    assert set(memory["parameters"]) == {4 * num_params}
    assert set(memory["gathered"]) == {0}
    assert (memory["activations"] > 0).all()


def test_a_run_without_measurements_shows_an_empty_table() -> None:
    run = ss.launch(small_job(steps=2, record=ss.Record(memory_first=0))).wait(60)
    assert run.memory().empty
    assert "optimizer" in run.memory().columns
