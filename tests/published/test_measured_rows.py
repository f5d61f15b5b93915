"""Measured data sets: read, fitted, and met by the shipped calibrations, which never score a fitted row unawares."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from published.calibrate import RECIPES, own_calibration
from published.datasets import load
from published.fit import Prior, fit
from published.lines import board
from published.tables import published
from shardscope.calibration.calibration import Calibration, catalogue
from shardscope.errors import DataError
from shardscope.measure.calibrate.rows import predicted_seconds

REFERENCE = Path(os.environ.get("SHARDSCOPE_MEASURED_ROWS", "no-such-file"))
"""A file of measured data sets as `published.datasets` reads it."""
BARS = {
    "vtrain_ground_truth_multi": (10, 0.95),
    "vtrain_ground_truth_single": (15, 0.95),
    "llm_foundry_benchmarks": (6, 0.95),
    "simumax_b200": (5, 0.95),
}
COLUMNS = [
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
    "tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)",
]  # fmt: skip
SAMPLE = {"vtrain_ground_truth_single": {"columns": COLUMNS, "rows": [
    [8, 16, 2, 2048, 16, 24, 1024, 2, 2, 2, 310.98], [4, 64, 1, 2048, 16, 16, 1024, 1, 4, 1, 1029.24],
]}}  # fmt: skip


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(SAMPLE))
    return path


def test_rows_become_layouts(sample: Path) -> None:
    first, second = load(sample)["vtrain_ground_truth_single"]
    assert (first.layout.tensor, first.layout.data, first.layout.pipeline) == (2, 2, 2)
    assert first.layout.num_micro_batches == 4
    assert second.seconds == pytest.approx(1.02924)
    assert first.key != second.key
    assert first.key == replace(first, seconds=99.0).key, "the hash is of the inputs alone"


def test_the_board_leaves_out_rows_that_were_fitted(sample: Path) -> None:
    rows = load(sample)
    known = Calibration.of("a100-megatron")
    seen = known.replace(fitted=(rows["vtrain_ground_truth_single"][0].key,))
    (line,) = board(rows, chosen=lambda _row: seen)
    assert (line.rows, line.score.rows) == ("held out", 1)
    assert [(one.rows, one.score.rows) for one in board(rows, fitted=True, chosen=lambda _row: seen)] == [
        ("held out", 1),
        ("fitted", 1),
    ]


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    rows = [row for name in ("Megatron SC21, table 1", "Korthikanti, table 5") for row in published()[name]]
    truth = Calibration(name="truth", matmul_efficiency=0.62, intra_efficiency=0.45, memory_efficiency=0.6)
    made = [
        replace(row, seconds=float(t)) for row, t in zip(rows, predicted_seconds(rows, truth), strict=True)
    ]
    priors = {
        name: Prior(0.7, 3.0) for name in ("matmul_efficiency", "intra_efficiency", "memory_efficiency")
    }
    found = fit(made, priors, Calibration(name="found"))
    for name in priors:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-2)


def test_odd_rows_do_not_bend_the_fit() -> None:
    rows = published()["Korthikanti, table 5"]
    truth = Calibration(name="truth", matmul_efficiency=0.62)
    made = [
        replace(row, seconds=float(t)) for row, t in zip(rows, predicted_seconds(rows, truth), strict=True)
    ]
    made[0] = replace(made[0], seconds=3 * made[0].seconds)
    found = fit(made, {"matmul_efficiency": Prior(0.7, 1.0)}, Calibration(name="found"))
    assert found.matmul_efficiency == pytest.approx(0.62, rel=0.03)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "holds no data set"),
        ('{"simumax_b200": {"rows": []}}', "lacks what its data set needs"),
    ],
)
def test_a_file_that_holds_no_rows_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load(path)
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "nothing.json")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_has_its_calibration(recipe: object) -> None:
    known = Calibration.of(recipe.name)  # type: ignore[attr-defined]
    for name, prior in recipe.priors.items():  # type: ignore[attr-defined]
        assert getattr(known, name) > 0
        assert prior.center > 0


@pytest.mark.parametrize("name", BARS)
def test_cross_validation_met_what_is_promised(name: str) -> None:
    """As scored when the shipped constants were fitted: each row by constants fitted to the other four fifths."""
    scores = [
        one.scores[key] for one in catalogue() for key in one.scores if key == f"{name}, cross-validated"
    ]
    rows = sum(score["rows"] for score in scores)
    assert sum(score["mape"] * score["rows"] for score in scores) / rows <= BARS[name][0]
    assert all(score["rank"] >= BARS[name][1] for score in scores)


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the measured rows are not part of the project")
@pytest.mark.parametrize("name", BARS)
def test_measured_rows_that_were_not_fitted_are_met(name: str) -> None:
    (line,) = board({name: load(REFERENCE)[name]}, chosen=own_calibration)
    assert line.rows == "held out"
    assert line.score.mape <= BARS[name][0]


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the measured rows are not part of the project")
def test_the_shipped_calibrations_beat_both_trivial_formulas() -> None:
    datasets = {name: rows for name, rows in load(REFERENCE).items() if name in BARS}
    for line in board(datasets, chosen=own_calibration):
        assert line.score.mape < line.plain.mape, line.dataset
        assert line.score.mape < line.constant_mfu.mape, line.dataset
