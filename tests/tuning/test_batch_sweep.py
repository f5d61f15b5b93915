"""Batch sweeps: equal samples, the rate looked for beyond the ends of the grid, what is there not run again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.errors import SpecError, StudyError
from shardscope.tuning.batch_sweep import MOST_ADDED
from shardscope.tuning.progress import SweepProgress
from shardscope.tuning.sweep_result import BatchSweep, Cell, SweepPoint
from shardscope_widgets import figures

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=16, batch=32)


def point(
    optimizer: str, batch: int, *values: float, seeds: int = 3, rates: tuple[float, ...] = (0.05, 0.1, 0.2)
) -> SweepPoint:
    return SweepPoint(optimizer, batch, 512 // batch, 0.1, values, seeds, rates, 0.002)


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
        "The largest batch size that reaches the target is 64, with lamb; the next larger one, 128, misses it. lamb "
        "reached it at a larger batch size than the others.\n"
        "Within the same number of epochs, a validation loss of 0.5 is reached by sgd up to 32 and lamb up to 64; "
        "not by lars.\n"
        "The fastest to the target is lamb at 64, in 16 ms of training (8 steps of 2 ms); "
        "at 32 it takes 32 ms (16 steps of 2 ms). Up to there, a larger batch saves time, so the loss of quality sets "
        "the limit.\n"
        "Narrowly missed, because one seed or more reach it: sgd at 64 (0.6).\n"
        "At batch size 64, a run has only 8 steps, so its validation loss says little.\n"
        "At batch size 128, a run has only 4 steps, so its validation loss says little."
    )
    quality, time = figures.batch_sweep(SWEEP, critical_batch=71.0).data[2:4]
    assert quality.name == time.name == "lamb"
    assert time.marker.symbol[1:] == (f"{time.marker.symbol[0]}", f"{time.marker.symbol[0]}-open")
    assert (
        "4 steps of 2 ms<br>rate 0.1, inside of 3 tried<br>seeds: 0.1; 2 failed" in quality.customdata[2][0]
    )


def test_words_connect_the_limit_with_the_target_the_rates_and_the_critical_batch_size() -> None:
    points = (
        point("sgd", 16, 0.4, seeds=1), point("sgd", 32, 0.9, seeds=1, rates=(0.1, 0.2, 0.4)),
        point("lars", 16, 0.3, seeds=1), point("lars", 32, 0.9, seeds=1),
    )  # fmt: skip
    info = figures.batch_sweep_info(BatchSweep(JOB, "loss", 0.5, points, points[0]), critical_batch=20.4)
    text = figures.batch_sweep_text(info)
    assert "This target is 1.25 times 0.4, the highest validation loss at batch size 16 (that of sgd)" in text
    assert "lars does not reach it at a larger batch size than the best of the others." in text
    assert "At batch size 32, the best rate of sgd is the lowest tried, so its limit may be higher." in text
    assert "The critical batch size, 20, is a different limit" in text
    assert "16 is the largest batch size at which these epochs still have enough steps for the target" in text
    figure = figures.draw_batch_sweep(info)
    assert "one seed" in figure.layout.annotations[0].text
    assert "critical batch size, 20" in [note.text for note in figure.layout.annotations]


def test_the_frame_has_seconds_and_says_where_a_rate_is_at_an_end() -> None:
    points = (point("sgd", 32, 0.4), point("sgd", 64, 0.9, 0.9, rates=(0.025, 0.05, 0.1)))
    frame = BatchSweep(JOB, "loss", 0.5, points).frame
    assert list(frame["edge"]) == ["", "highest"]
    assert list(frame["seconds_per_step"]) == [0.002, 0.002]
    assert list(frame["reached"]) == [False, False]
    assert frame["seconds_to_target"].isna().all()


def test_progress_counts_runs_and_tells_the_time_left() -> None:
    progress = SweepProgress(shown=False)
    progress.expect(80)
    assert progress.line(0.0).endswith(" run 1 of about 80")
    for _ in range(20):
        progress.count()
    assert progress.line(40.0).endswith(" run 21 of about 80, about 2 min left")
    progress.expect(2)
    assert progress.line(40.0).endswith(" run 21 of about 22, about 4 s left")


@pytest.mark.slow
def test_a_sweep_runs_every_optimizer_alike_and_goes_on_where_it_was(
    runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells: list[Cell] = []
    asked = {
        "batches": ss.PowersOfTwo(32, 64),
        "optimizers": ["adamw", "lamb"],
        "factors": [1.0, 4.0],
        "seeds": [0, 1],
    }
    first = ss.batch_sweep(JOB, name="sweep", on_cell=cells.append, **asked)  # type: ignore[arg-type]
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{len(cells)} runs in ")
    assert {(c.optimizer, c.batch): c.steps for c in cells} == {
        ("adamw", 32): 16, ("adamw", 64): 8, ("lamb", 32): 16, ("lamb", 64): 8,
    }  # fmt: skip
    for point in first.points:
        assert point.step_s and point.step_s > 0
        assert point.edge is None or len(point.rates) == 2 + MOST_ADDED
        assert len([c for c in cells if (c.optimizer, c.batch) == (point.optimizer, point.batch)]) == (
            len(point.rates) + 1
        )
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
    with pytest.raises(StudyError, match="belongs to a sweep with a different job"):
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
        ({"batches": ss.PowersOfTwo(1, 64)}, "is not divisible by world_size=2"),
        ({"batches": ss.PowersOfTwo(32, 512)}, "leaves only 1 step, because every run"),
        ({"batches": ss.PowersOfTwo(32, 64), "optimizers": ["adamx"]}, "did you mean 'adamw'"),
        ({"batches": ss.PowersOfTwo(32, 64), "seeds": []}, "leave nothing to run"),
        ({"batches": ss.PowersOfTwo(32, 64), "seeds": [0]}, "leave none for the median"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ss.batch_sweep(JOB, **given)  # type: ignore[arg-type]
