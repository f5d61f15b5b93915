"""Runs compared with each other: from Python and from the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.cli import main


@pytest.fixture
def two() -> tuple[ss.Run, ss.Run]:
    rates = (1e-3, 1e-2)
    runs = [ss.launch(small_job(steps=5, optimizer=ss.Optimizer("adamw", lr=lr))).wait(60) for lr in rates]
    return runs[0], runs[1]


@pytest.mark.parametrize("given", [None, 3])
def test_what_is_not_a_list_of_runs_is_refused(given: object) -> None:
    with pytest.raises(ss.ShardscopeError, match=f"takes a list of runs, got {given}; write ss.compare_runs"):
        ss.compare_runs(given)


def test_settings_results_and_changes_come_from_the_summaries(two, capsys) -> None:
    one, other = two
    found = ss.compare_runs(two, baseline=one)
    assert found.settings().to_dict() == {"optimizer.lr": {"lr 0.001": 1e-3, "lr 0.01": 1e-2}}
    assert list(found.results()["loss"]) == [one.summary().loss, other.summary().loss]
    change = other.summary().loss / one.summary().loss - 1
    assert found.changes()["loss"].tolist() == pytest.approx([0, change])
    assert list(found.grouped("strategy")["runs"]) == [2]
    assert list(found.grouped("optimizer.betas")["runs"]) == [2]
    assert "lr 0.01 has the " in repr(found) or "lr 0.001 has the " in repr(found)
    assert "is the fastest: " in repr(found)
    even = [
        replace(run, summary=replace(run.summary, loss_mean=0.3359 + at / 1e7))
        for at, run in enumerate(found.runs)
    ]
    assert "All have the same mean loss (last 10 steps): 0.3359." in repr(replace(found, runs=(*even,)))
    with_one_more = (*even, replace(even[0], run_id="3", summary=replace(even[0].summary, loss_mean=1.0)))
    told = repr(replace(found, runs=with_one_more))
    assert "lr 0.001 and lr 0.01 have the lowest mean loss (last 10 steps): 0.3359." in told
    diverged = replace(even[0], run_id="3", summary=replace(even[0].summary, loss_mean=9e9, diverged_at=3))
    told = repr(replace(found, runs=(*even, diverged)))
    assert "lr 0.001 and lr 0.01 have the same mean loss (last 10 steps): 0.3359." in told
    assert "Changes are relative to lr 0.001." in found._repr_html_()
    for label in (
        "sent per step (all ranks)", "peak memory per rank", "process memory growth per rank"
    ):  # fmt: skip
        assert all(label in text for text in (repr(found), found._repr_html_(), one._repr_html_()))

    assert main(["compare", one.id, other.id, "--baseline", one.id]) == 0
    assert "lr 0.01" in capsys.readouterr().out
    assert main(["compare", str(one.path), other.id, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [run["settings"] for run in plain["runs"]] == [{"optimizer.lr": 1e-3}, {"optimizer.lr": 1e-2}]
    assert plain["runs"][1]["results"]["loss"] == other.summary().loss
    assert main(["compare", one.id, one.id]) == 2
    assert "is given twice" in capsys.readouterr().err
    assert main(["compare", one.id, other.id, "--nodes", "2"]) == 2
    assert "--nodes has no effect with several runs" in capsys.readouterr().err


def test_a_number_of_steps_that_is_set_is_not_listed_again_as_a_result() -> None:
    found = ss.compare_runs([ss.launch(small_job(steps=steps)).wait(60) for steps in (3, 4)])
    assert found._repr_html_().count(">steps<") == 1
    assert "All have completed their steps." in repr(found)
