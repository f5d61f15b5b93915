"""Batch sweeps: equal samples, the rate looked for beyond the ends of the grid, what is there not run again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.errors import SpecError, StudyError
from shardscope.tuning.batch_sweep import MOST_ADDED, _Grid, _next_place
from shardscope.tuning.progress import SweepProgress
from shardscope.tuning.runs import RunDriver
from shardscope.tuning.sweep_result import BatchSweep, Cell, SweepPoint
from shardscope_widgets import figures
from shardscope_widgets.figures import _batch_sweep

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
    batches=(32, 64, 128, 256),
)  # fmt: skip


def test_the_largest_batch_is_the_last_before_the_first_that_misses() -> None:
    assert SWEEP.largest("sgd") == 32  # what a larger one reaches by chance does not count
    assert SWEEP.largest("lamb") == 64  # a failed seed is one that misses, and two of three reach it
    assert SWEEP.largest("lars") is None
    assert math.isinf(SWEEP.points[-1].median)
    hopeless = BatchSweep(JOB, "loss", math.inf, SWEEP.points[-1:])
    assert hopeless.largest("lars") is None
    assert figures.batch_sweep(hopeless).data


def test_the_answer_and_the_list_agree_on_what_is_too_close_to_call() -> None:
    points = (
        point("sgd", 16, 0.4, seeds=1), point("sgd", 32, 0.4, seeds=1), point("sgd", 64, 0.9, seeds=1),
        point("lars", 16, 0.3, seeds=1), point("lars", 32, 0.6, 0.6, 0.4),
    )  # fmt: skip
    info = _batch_sweep.batch_sweep_info(BatchSweep(JOB, "loss", 0.5, points, points[0]))
    text = _batch_sweep.batch_sweep_text(info)
    assert "lars reaches 16, with 32 too close to call: it does not help here.**" in text
    assert "narrowly missed by lars at 32." in text


def test_no_error_at_all_can_be_drawn() -> None:
    perfect = BatchSweep(JOB, "error", 0.0, (point("sgd", 32, 0.0, 0.0, 0.0),))
    assert perfect.largest("sgd") == 32
    assert figures.batch_sweep(perfect).layout.yaxis.type != "log"


def test_the_chart_and_its_words() -> None:
    info = _batch_sweep.batch_sweep_info(SWEEP)
    assert [line.largest for line in info.lines] == [32, 64, None]
    assert info.lines[1].medians == (0.45, 0.4, None)
    assert _batch_sweep.batch_sweep_text(info) == (
        "**The batch can grow to 64 before the target is missed, though runs of only 8 steps at that size say little. "
        "lamb narrowly reaches 64 (sgd: 32), with 128 too close to call, lars misses it at every size tried: "
        "lamb may help here.**\n\n"
        "- The target: a validation loss of 0.5 or less, after 512 samples at every batch size.\n"
        "- It is reached by sgd up to 32 and lamb up to 64; not by lars.\n"
        "- Between 64 and 128, no size was tested, so the limit lies somewhere between the two. The sweep of an "
        "optimizer ends at its first miss, so 256 was not run.\n"
        "- Too close to call, because the seeds lie on both sides of the target: narrowly reached by lamb at 32 and "
        "lamb at 64; narrowly missed by sgd at 64 and lamb at 128.\n"
        "- The fastest to the target is lamb at 64, in 16 ms of training (8 steps of 2 ms); "
        "at 32 it takes 32 ms (16 steps of 2 ms).\n"
        "- At batch size 64, a run has only 8 steps, so its validation loss says little.\n"
        "- At batch size 128, a run has only 4 steps, so its validation loss says little."
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
    info = _batch_sweep.batch_sweep_info(BatchSweep(JOB, "loss", 0.5, points, points[0]), critical_batch=20.4)
    text = _batch_sweep.batch_sweep_text(info)
    assert "It is 1.25 times the highest validation loss at batch size 16 (0.4, with sgd), so" in text
    assert "lars ties sgd at 16: it does not help here.**" in text
    assert (
        "At batch size 32, the best learning rate of sgd is the lowest tried, so its limit may be higher."
        in text
    )
    assert (
        "Use 16 to train on 512 samples, the largest batch size that reached the target; with more samples, batches up "
        "to the critical batch size, 20, save steps almost in proportion."
    ) in text
    assert _batch_sweep.batch_limits_text(info._replace(critical_batch=7.1)) == (
        "Use 16 to train on 512 samples, the largest batch size that reached the target; beyond the critical batch "
        "size, 7, a larger batch saves fewer steps than in proportion."
    )
    few = info._replace(lines=tuple(line._replace(steps=(4, 2)) for line in info.lines))
    assert _batch_sweep.batch_limits_text(few).startswith(
        "Sweep with more samples: 16, the largest that reached "
    )
    within = _batch_sweep.batch_limits_text(few._replace(critical_batch=7.1))
    assert within.startswith("Use the critical batch size, 7, up to which ")
    figure = _batch_sweep.draw_batch_sweep(info)
    assert "one seed" in figure.layout.annotations[0].text
    assert "critical batch size, 20" in [note.text for note in figure.layout.annotations]


def test_the_frame_has_seconds_and_says_where_a_rate_is_at_an_end() -> None:
    points = (point("sgd", 32, 0.4), point("sgd", 64, 0.9, 0.9, rates=(0.025, 0.05, 0.1)))
    frame = BatchSweep(JOB, "loss", 0.5, points).frame
    assert list(frame["edge"]) == ["", "highest"]
    assert list(frame["seconds_per_step"]) == [0.002, 0.002]
    assert list(frame["reached"]) == [False, False]
    assert frame["seconds_to_target"].isna().all()


def test_the_answer_states_the_accuracy_before_and_after_the_limit() -> None:
    points = [
        SweepPoint("adamw", batch, 512 // batch, 0.1, (loss,), 1, (0.1,), 0.002, (accuracy,))
        for batch, loss, accuracy in ((16, 0.3, 0.975), (32, 0.4, 0.97), (64, 0.9, 0.9))
    ]
    info = _batch_sweep.batch_sweep_info(BatchSweep(JOB, "loss", 0.5, tuple(points)))
    assert _batch_sweep.batch_sweep_text(info).startswith(
        "**The batch can grow to 32 before the target is missed, with adamw. Validation accuracy of adamw: 97.5% at "
        "16, 97.0% at 32 and 90.0% at 64.**"
    )
    assert "accuracy 97.5%<br>" in _batch_sweep.draw_batch_sweep(info).data[0].customdata[0][0]


def test_the_table_says_in_words_what_was_reached_and_what_was_not_run() -> None:
    table = SWEEP.table
    assert table.loc[("lamb", "64")].tolist() == ["yes, narrowly", "0.4", "unknown", "0.1", "8", "16 ms"]
    assert table.loc[("lars", "32"), "validation loss"] == "diverged"
    assert table.loc[("lars", "64, 128, 256"), "reaches the target"] == "not run, because 32 missed it"
    assert not table.isna().any().any()
    assert SWEEP.point("lamb", 64).values == (0.4, 0.4)
    with pytest.raises(StudyError, match="did not run lars at batch size 64; it ran sgd at 32"):
        SWEEP.point("lars", 64)


def cells(*values: float | None) -> dict[int, Cell]:
    return {place: Cell("lamb", 32, 0.1, 0, value, 16) for place, value in enumerate(values)}


def test_the_search_for_a_rate_moves_towards_lower_losses_until_the_best_lies_inside() -> None:
    start = {1: cells(0.5)[0]}
    assert _next_place(start, 3, is_upwards=True) == 2
    assert _next_place(start, 3, is_upwards=False) == 0
    assert _next_place(cells(0.5), 1, is_upwards=True) is None  # a single rate is not searched
    assert _next_place(cells(0.5, 0.3, 0.4), 3, is_upwards=True) is None
    assert _next_place(cells(0.5, 0.4, 0.3), 3, is_upwards=True) == 3
    assert _next_place(cells(0.3, 0.4, 0.5), 3, is_upwards=True) == -1
    assert _next_place(cells(None, None, None), 3, is_upwards=True) == -1  # higher rates diverge too
    assert _next_place(cells(*[1 / n for n in range(1, 4 + MOST_ADDED)]), 3, is_upwards=True) is None
    assert [_Grid([1.0, 2.0, 4.0], 1).rate(place) for place in (-2, -1, 0, 2, 3)] == [
        0.25,
        0.5,
        1.0,
        4.0,
        8.0,
    ]


def test_progress_counts_runs_and_tells_the_time_left() -> None:
    progress = SweepProgress(shown=False)
    progress.expect(80, 80.0)
    assert progress.line().endswith(" run 1 of about 80 or fewer")
    for _ in range(20):
        progress.count(1.0)
    progress._pace._began -= 40
    assert progress.line().endswith(" run 21 of about 80 or fewer, about 2 min left")
    progress.expect(60, 15.0)  # larger batches have fewer steps
    assert progress.line().endswith(" run 21 of about 80 or fewer, about 30 s left")
    progress.expect(2, 2.0)
    assert progress.line().endswith(" run 21 of about 22 or fewer, about 4 s left")
    assert progress.last_line(40.0) == (
        "20 runs in 40 s; 60 fewer than planned, because they could not change the result"
    )
    assert progress.last_line(40.0, is_complete=False) == "20 runs in 40 s"


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
    first = ss.batch_sweep(JOB, name="sweep", thorough=True, on_cell=cells.append, **asked)  # type: ignore[arg-type]
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
    second = ss.batch_sweep(JOB, name="sweep", thorough=True, on_cell=again.append, **asked)  # type: ignore[arg-type]
    assert again == [Cell(**json.loads(lines[-1]))]
    assert second == first
    with pytest.raises(StudyError, match="belongs to a sweep with a different job"):
        ss.batch_sweep(JOB.replace(steps=8), name="sweep", **asked)  # type: ignore[arg-type]


def test_a_run_of_a_sweep_that_is_stopped_or_interrupted_is_no_result(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"batches": ss.PowersOfTwo(32, 32), "optimizers": ["adamw"], "factors": [1.0], "seeds": [0]}
    runs: list[ss.Run] = []
    tick = RunDriver.tick

    def stopped(driver: Any) -> bool:
        runs.extend(live.run.stop() for live in driver.live.values())
        return tick(driver)

    def interrupted(driver: Any) -> bool:
        runs.extend(live.run for live in driver.live.values())
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDriver, "tick", stopped)
    with pytest.raises(StudyError, match="was stopped; call the sweep again"):
        ss.batch_sweep(JOB.replace(steps=4000), name="stopped", **asked)  # type: ignore[arg-type]
    monkeypatch.setattr(RunDriver, "tick", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ss.batch_sweep(JOB.replace(steps=4000), name="stopped", **asked)  # type: ignore[arg-type]
    assert [run.state for run in runs] == ["stopped", "stopped"]
    assert not (runs_root / "studies/stopped/cells.jsonl").exists()


def test_the_search_for_a_rate_ends_with_one_that_reaches_the_target(runs_root: Path) -> None:
    cells: list[Cell] = []
    asked = {"batches": ss.PowersOfTwo(32, 32), "optimizers": ["adamw"], "seeds": [0, 1]}
    job = JOB.replace(steps=2)
    easy = ss.batch_sweep(job, name="easy", target=9.0, on_cell=cells.append, **asked)  # type: ignore[arg-type]
    assert [(cell.rate, cell.seed) for cell in cells] == [(easy.points[0].rate, 0), (easy.points[0].rate, 1)]
    assert easy.points[0].accuracies == (cells[1].accuracy,)
    cells.clear()
    hard = ss.batch_sweep(job, name="hard", target=1e-9, on_cell=cells.append, **asked)  # type: ignore[arg-type]
    assert len({cell.rate for cell in cells}) == len(hard.points[0].rates) >= 3


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
        ({"batches": [32, 64]}, "is not a range of batch sizes"),
        ({"batches": ss.PowersOfTwo(32, 64), "seeds": []}, "leave nothing to run"),
        ({"batches": ss.PowersOfTwo(32, 64), "seeds": [0]}, "leave none for the median"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ss.batch_sweep(JOB, **given)  # type: ignore[arg-type]
