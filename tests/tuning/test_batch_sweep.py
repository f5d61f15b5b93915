"""Batch sweeps: equal samples, equal runs for every optimizer, the rate looked for, what is there not run again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.errors import SpecError, StudyError
from shardscope.tuning.batch_sweep import BatchSweep, Cell, SweepPoint
from shardscope_widgets import figures

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=16, batch=32)


def point(optimizer: str, batch: int, *values: float, seeds: int = 3) -> SweepPoint:
    return SweepPoint(optimizer, batch, 512 // batch, 0.1, values, seeds)


SWEEP = BatchSweep(
    JOB, "loss", 0.5,
    (
        point("sgd", 32, 0.3, 0.4, 0.2), point("sgd", 64, 0.6, 0.7, 0.4), point("sgd", 128, 0.3, 0.3, 0.3),
        point("lamb", 32, 0.45, 0.2, 0.9), point("lamb", 64, 0.4, 0.4), point("lamb", 128, 0.1),
        point("lars", 32),
    ),
)  # fmt: skip


def test_the_largest_batch_is_the_last_before_the_first_that_misses() -> None:
    assert SWEEP.largest("sgd") == 32  # what a larger one reaches by chance does not count
    assert SWEEP.largest("lamb") == 64  # a failed seed is one that misses, and two of three reach it
    assert SWEEP.largest("lars") is None
    assert math.isinf(SWEEP.points[-1].median)
    hopeless = BatchSweep(JOB, "loss", math.inf, SWEEP.points[-1:])
    assert hopeless.largest("lars") is None
    assert figures.batch_sweep(hopeless).data


def test_no_error_at_all_can_be_drawn() -> None:
    perfect = BatchSweep(JOB, "error", 0.0, (point("sgd", 32, 0.0, 0.0, 0.0),))
    assert perfect.largest("sgd") == 32
    assert figures.batch_sweep(perfect).layout.yaxis.type != "log"


def test_the_chart_and_its_words() -> None:
    info = figures.batch_sweep_info(SWEEP)
    assert [line.largest for line in info.lines] == [32, 64, None]
    assert info.lines[1].medians == (0.45, 0.4, None)
    assert figures.batch_sweep_text(info) == (
        "Within the same number of epochs, a validation loss of 0.5 is reached by sgd up to 32 and lamb up to 64; "
        "not by lars."
    )
    assert len(figures.batch_sweep(SWEEP).data) == 3


@pytest.mark.slow
def test_a_sweep_runs_every_optimizer_alike_and_goes_on_where_it_was(runs_root: Path) -> None:
    cells: list[Cell] = []
    asked = {
        "batches": ss.PowersOfTwo(32, 64),
        "optimizers": ["adamw", "lamb"],
        "factors": [1.0, 4.0],
        "seeds": [0, 1],
    }
    first = ss.batch_sweep(JOB, name="sweep", on_cell=cells.append, **asked)  # type: ignore[arg-type]
    assert {(c.optimizer, c.batch): c.steps for c in cells} == {
        ("adamw", 32): 16, ("adamw", 64): 8, ("lamb", 32): 16, ("lamb", 64): 8,
    }  # fmt: skip
    assert len(cells) == 2 * 2 * (2 + 1)
    best = min(
        (c for c in cells if (c.optimizer, c.batch) == ("lamb", 64) and c.seed == 0),
        key=lambda c: c.value or 9,
    )
    assert best.rate == next(p.rate for p in first.points if (p.optimizer, p.batch) == ("lamb", 64))
    counted = {(c.optimizer, c.batch): c.value for c in cells if c.seed == 1}
    assert {(p.optimizer, p.batch): p.values for p in first.points} == {k: (v,) for k, v in counted.items()}
    journal = runs_root / "studies/sweep/cells.jsonl"
    lines = [line for line in journal.read_text().splitlines() if line]
    journal.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # killed while it wrote the last
    again: list[Cell] = []
    second = ss.batch_sweep(JOB, name="sweep", on_cell=again.append, **asked)  # type: ignore[arg-type]
    assert again == [Cell(**json.loads(lines[-1]))]
    assert second == first
    with pytest.raises(StudyError, match="is a sweep of another job"):
        ss.batch_sweep(JOB.replace(steps=8), name="sweep", **asked)  # type: ignore[arg-type]


def test_a_run_of_a_sweep_that_is_stopped_or_interrupted_is_no_result(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"batches": ss.PowersOfTwo(32, 32), "optimizers": ["adamw"], "factors": [1.0], "seeds": [0]}
    runs: list[ss.Run] = []
    wait = ss.Run.wait

    def stopped(run: ss.Run, timeout: float | None = None) -> ss.Run:
        runs.append(run)
        return wait(run.stop(), timeout)

    def interrupted(run: ss.Run, timeout: float | None = None) -> ss.Run:
        runs.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(ss.Run, "wait", stopped)
    with pytest.raises(StudyError, match="was stopped; call the sweep again"):
        ss.batch_sweep(JOB.replace(steps=4000), name="stopped", **asked)  # type: ignore[arg-type]
    monkeypatch.setattr(ss.Run, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ss.batch_sweep(JOB.replace(steps=4000), name="stopped", **asked)  # type: ignore[arg-type]
    assert [run.state for run in runs] == ["stopped", "stopped"]
    assert not (runs_root / "studies/stopped/cells.jsonl").exists()


def test_a_single_rate_is_not_chosen_so_all_seeds_count(runs_root: Path) -> None:
    job = JOB.replace(steps=2)
    sweep = ss.batch_sweep(
        job, batches=ss.PowersOfTwo(32, 32), optimizers=["adamw"], factors=[1.0], seeds=[0, 1], target=9.0
    )
    assert len(sweep.points[0].values) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batches": ss.PowersOfTwo(1, 64)}, "does not divide over world_size=2"),
        ({"batches": ss.PowersOfTwo(32, 512)}, "leaves 1 step of 16"),
        ({"batches": ss.PowersOfTwo(32, 64), "optimizers": ["adamx"]}, "did you mean 'adamw'"),
        ({"batches": ss.PowersOfTwo(32, 64), "seeds": []}, "leave nothing to run"),
        ({"batches": ss.PowersOfTwo(32, 64), "seeds": [0]}, "leave none for the median"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ss.batch_sweep(JOB, **given)  # type: ignore[arg-type]
