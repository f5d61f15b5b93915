"""The scoreboard: compares predictions with tables that no calibration was fitted to."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import spearmanr

from shardscope import cli
from shardscope.measure.scoreboard.score import Score, rank_correlation
from shardscope.measure.scoreboard.tables import published
from shardscope.spec.calibration import catalogue


def test_nothing_was_fitted_to_the_tables_that_ship() -> None:
    fitted = {key for one in catalogue() for key in one.fitted}
    assert not fitted & {row.key for rows in published().values() for row in rows}


def test_the_rank_correlation_is_spearmans() -> None:
    random = np.random.default_rng(1)
    left, right = random.integers(0, 9, 40).astype(float), random.normal(size=40)
    assert rank_correlation(left, right) == pytest.approx(spearmanr(left, right)[0])


def test_a_score_of_known_errors() -> None:
    score = Score.of(np.array([1.1, 1.8]), np.array([1.0, 2.0]))
    assert score.mape == pytest.approx(10)
    assert score.worst == pytest.approx(10)
    assert (score.rank, score.rows) == (pytest.approx(1), 2)


def test_the_command_prints_the_tables_that_ship(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scoreboard"]) == 0
    printed = capsys.readouterr().out
    assert "Korthikanti, table 5" in printed
    assert "plain formula" in printed


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scoreboard", "--json"]) == 0
    lines = {(line["dataset"], line["rows"]): line for line in json.loads(capsys.readouterr().out)}
    assert lines["Llama 3, table 4", "never fitted"]["n"] == 3
