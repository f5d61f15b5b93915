"""The scoreboard: compares predictions with published tables, as fitted and as predicted without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardscope as ss
from published.formulas import Ranking, losses
from published.lines import board
from published.one_step import OneStep
from published.shipped import scores, step_times
from published.tables import published
from shardscope import cli
from shardscope.calibration.effects import composed, table_scores
from shardscope.calibration.software import SOFTWARE
from shardscope.commands.scoreboard import shipped_scores
from shardscope.measure.calibrate.rows import Score, calibration_of_row, predicted_seconds
from shardscope.spec.cluster import Device


def test_every_table_that_ships_was_also_predicted_without_it() -> None:
    assert published().keys() <= table_scores().keys()


def test_rows_that_were_fitted_are_known_by_their_keys() -> None:
    known = set(composed(SOFTWARE["nemo"], Device.of("h100-80gb")).fitted)
    for name, rows in published().items():
        fitted = 0 if name == "FSDP of Lightning, V100" else min(len(rows), 20)
        assert sum(row.key in known for row in rows) == fitted, name


def test_the_key_of_a_row_stays_when_layouts_get_a_new_field() -> None:
    layouts = [
        row.inputs["layout"] for rows in published().values() for row in rows if "layout" in row.inputs
    ]
    assert layouts
    assert not any("recompute_layers" in layout for layout in layouts)
    moved = [layout for layout in layouts if "offload" in layout]
    assert {layout["offload"] for layout in moved} == {"activations"}, "only where a source says so"


def test_a_score_of_known_errors() -> None:
    score = Score.of(np.array([1.1, 1.8]), np.array([1.0, 2.0]))
    assert score.mape == pytest.approx(10)
    assert score.worst == pytest.approx(10)
    assert (score.rank, score.rows) == (pytest.approx(1), 2)


def test_one_measured_row_predicts_rows_that_are_off_by_the_same_factor() -> None:
    rows = published()["Korthikanti, table 5"]
    known = calibration_of_row(rows[0])
    made = predicted_seconds(rows, known)
    exact = [replace(row, seconds=float(1.2 * time)) for row, time in zip(rows, made, strict=True)]
    found = OneStep.of(exact, known)
    assert found.after < 8
    far = OneStep.of([replace(row, seconds=3 * row.seconds) for row in exact], known)
    assert (found.covered, far.covered) == (100, 0)


def test_every_row_that_ships_is_predicted() -> None:
    for name, rows in published().items():
        known = {each.name: each for each in map(calibration_of_row, rows)}
        for calibration in known.values():
            made = predicted_seconds(rows, calibration)
            assert np.isfinite(made).all(), name
            assert (made > 0).all(), name


def same(shipped: object, found: object) -> bool:
    """Whether scores are the same up to rounding; undefined ones are NaN on both sides."""
    if isinstance(shipped, dict) and isinstance(found, dict):
        return shipped.keys() == found.keys() and all(same(shipped[name], found[name]) for name in shipped)
    if isinstance(shipped, list) and isinstance(found, list):
        return len(shipped) == len(found) and all(map(same, shipped, found))
    return shipped == (pytest.approx(found, rel=1e-6, nan_ok=True) if isinstance(found, float) else found)


@pytest.mark.weekly
def test_the_scores_that_ship_are_those_of_the_tables() -> None:
    """If not: ``cd tests; python -m published.shipped`` writes them anew."""
    assert same(shipped_scores(), scores())


def test_scores_of_some_tables_that_ship_are_those_of_the_tables() -> None:
    names = {"Korthikanti, table 5", "Llama 3, table 4"}
    shipped = [line for line in shipped_scores()["tables"] if line["dataset"] in names]
    assert len(shipped) == 2
    assert same(shipped, step_times(names))


def test_the_command_prints_all_tables_that_ship(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scoreboard"]) == 0
    now, left_out = capsys.readouterr().out.split("\n\nPredicted without the table")
    assert {name for name in published() if f"\n{name} " not in now} == set()
    assert {name for name in table_scores() if f"\n{name} " not in left_out} == set()


def test_the_command_prints_the_tables_that_ship_and_all_tables_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["scoreboard"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Korthikanti, table 5") == 2
    beaten = [
        n for n, each in table_scores().items() if each["left_out"] > min(each["plain"], each["constant_mfu"])
    ]
    assert f"A trivial formula predicts {len(beaten)} of {len(table_scores())} tables better" in printed
    assert all(name in printed.rpartition("A trivial formula")[2] for name in beaten)
    assert "plain formula" in printed
    assert "BLOOM" in printed
    assert printed.count("LLM Foundry, h100") == 1


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scoreboard", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    lines = {line["dataset"]: line for line in printed["tables"]}
    assert lines["Llama 3, table 4"]["n"] == 3
    assert printed["left_out"]["Llama 3, table 4"]["rows"] == 3
    assert 0 <= printed["left_out"]["LLM Foundry, h100"]["p_value"] <= 1


@pytest.mark.parametrize(("fitted", "kinds"), [(0, ["never fitted"]), (1, ["held out", "fitted"])])
def test_siblings_of_fitted_rows_are_held_out(fitted: int, kinds: list[str]) -> None:
    rows = published()["Megatron Bridge, B200"]
    known = calibration_of_row(rows[0]).replace(fitted=tuple(row.key for row in rows[:fitted]), scores={})
    lines = board({"mine": rows}, fitted=True, chosen=lambda _row: known)
    assert [line.rows for line in lines] == kinds
    assert [line.score.rows for line in lines] == [len(rows) - fitted, fitted][: len(kinds)]


def test_a_choice_loses_what_its_measured_time_exceeds_that_of_the_best_by() -> None:
    rows = published()["Korthikanti, table 5"]
    measured = np.array([row.seconds for row in rows])
    assert losses(rows, measured) == [0.0] * 4
    ranking = Ranking.of(rows, 1 / measured)
    assert (ranking.groups, ranking.near) == (4, 0)
    pairs = measured.reshape(4, 2)
    assert ranking.worst == pytest.approx(100 * (pairs.max(axis=1) / pairs.min(axis=1) - 1).max())
    assert Ranking.of(rows[:1], measured[:1]).groups == 0
    twice = [rows[0], replace(rows[0], seconds=2.0)]
    assert losses(twice, measured[:2]) == []


STEPS = """model,device,data,tensor,global_batch,recompute,step_time_s,label
llama-2-13b,a100-80gb,4,8,256,full,30,first
llama-2-13b,a100-80gb,8,4,256,full,27,second
"""


def test_steps_of_ones_own_are_compared_with_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(STEPS)
    assert cli.main(["scoreboard", "--rows", str(file), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (line,), (first, second) = printed["tables"], printed["rows"]
    assert (line["dataset"], line["n"], line["covered_percent"]) == ("mine", 2, 100)
    layout = ss.Layout(data=4, tensor=8, global_batch=256, recompute="full")
    found = ss.predict("llama-2-13b", ss.Cluster.of("a100-80gb", nodes=4), layout)
    assert first["predicted_s"] == pytest.approx(found.step_time_s)
    assert (first["low_s"], first["high_s"]) == pytest.approx(tuple(found.interval))
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in (first, second)]
    assert line["mape_percent"] == pytest.approx(50 * sum(errors))
    assert cli.main(["scoreboard", "--rows", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "second" in printed
    assert (
        "2 steps: mean error 12.9 %, largest 19.1 %, 100 % inside the interval, rank correlation" in printed
    )
    file.write_text("\n".join(STEPS.splitlines()[:2]))
    assert cli.main(["scoreboard", "--rows", str(file)]) == 0
    assert (
        "1 step: mean error 6.7 %, largest 6.7 %, 100 % inside the interval; predicted"
        in capsys.readouterr().out
    )


def test_an_option_of_rows_is_refused_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scoreboard", "--software", "fsdp2"]) != 0
    assert "--software has no effect without --rows" in capsys.readouterr().err
    assert cli.main(["scoreboard", "--memory", "--model", "gpt3-175b"]) != 0
    assert "--model has no effect with --memory; leave it out" in capsys.readouterr().err
