"""Step times that were predicted at the launch of runs, beside those that the runs measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.calibration.calibration import Interval
from shardscope.cli import main
from shardscope.errors import SpecError
from shardscope.measure.accuracy import Accuracy, inside_text
from shardscope.runtime.record.launch_prediction import FILE
from shardscope_widgets.figures._accuracy import accuracy_info, draw_accuracy


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs under two strategies, and one that was launched without a prediction."""
    root = tmp_path_factory.mktemp("runs")
    for strategy, group, preflight in (("ring", "a", True), ("zero-1", "b", True), ("ring", "a", False)):
        job = small_job(strategy=strategy)
        ss.launch(job, root=root, group=group, preflight=preflight).wait(110)
    return root


def test_a_run_keeps_what_was_predicted_at_its_launch(root: Path) -> None:
    without, second, first = ss.runs(root)
    assert without.predicted is None
    for run in (first, second):
        now = ss.predict(run.job)
        assert run.predicted is not None
        assert run.predicted.step_time_s == pytest.approx(now.step_time_s)
        assert run.predicted.interval == pytest.approx(now.interval)
        assert run.predicted.constants == now.host.label
        assert run.predicted.load >= 0


def test_errors_are_those_of_the_recorded_predictions(root: Path) -> None:
    found = ss.accuracy(root)
    frame = found.frame().set_index("run")
    assert list(frame.strategy) == ["ring", "zero-1"]  # oldest first
    for run in ss.runs(root)[1:]:
        row = frame.loc[run.id]
        assert row.error == pytest.approx(run.predicted.step_time_s / run.summary().step_time_s - 1)
        low, high = run.predicted.interval
        assert row.inside == (low <= run.summary().step_time_s <= high)
    assert found.without == 1
    assert found.median_error == pytest.approx(frame.error.abs().median())
    by = found.by("strategy")
    assert list(by.runs) == [1, 1]
    assert by.loc["ring"].largest_error == pytest.approx(frame.error.iloc[0])
    assert "1 other runs" not in repr(found)
    assert ss.accuracy(root, group="b").by("world_size").runs.to_dict() == {2: 1}
    with pytest.raises(SpecError, match=r"'stratgy' is not known.*strategy"):
        found.by("stratgy")


def test_damaged_files_and_no_runs_are_no_errors(root: Path, tmp_path: Path) -> None:
    path = ss.runs(root)[1].path / FILE
    kept = path.read_text()
    try:
        zero = json.dumps({**json.loads(kept), "step_time_s": 0.0})
        for text in ("{", "[]", json.dumps({"step_time_s": "soon", "interval": None}), zero):
            path.write_text(text)
            assert len(ss.accuracy(root).runs) == 1
        path.write_text(kept)
        (path.parent / "cluster.json").write_text("{")
        assert len(ss.accuracy(root).runs) == 1
    finally:
        path.write_text(kept)
        (path.parent / "cluster.json").unlink(missing_ok=True)
    nothing = ss.accuracy(tmp_path)
    assert nothing == Accuracy(())
    assert nothing.median_error is nothing.coverage is None
    assert "No run has both" in repr(nothing)
    assert nothing.by().empty


def test_the_command_prints_the_table_and_the_records(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", "--root", str(root), "--by", "world_size"]) == 0
    said = capsys.readouterr().out
    assert re.match(
        r"2 step-time predictions checked so far on this machine, with (errors of \d+ to \d+|an error of \d+)%; "
        r"median error of 2 runs, predicted at ",
        said,
    )
    assert inside_text(ss.accuracy(root).runs) in said
    assert inside_text(ss.accuracy(root).runs) in repr(ss.compare_runs(ss.runs(root)[1:]))
    assert main(["accuracy", "--root", str(root), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["settings"]["strategy"] for row in said["runs"]] == ["ring", "zero-1"]


def test_the_figure_has_a_marker_for_each_run(root: Path) -> None:
    info = accuracy_info(ss.accuracy(root))
    assert [point.number for point in info.points] == [1, 2]
    assert [number for number, _ in info.constants] == [1]
    drawn = {trace.name: trace.y[0] for trace in draw_accuracy(info).data}
    assert drawn == pytest.approx({p.strategy: p.predicted_s / p.measured_s for p in info.points})


def test_few_step_times_are_described_by_their_distance_and_many_are_counted(root: Path) -> None:
    one = ss.accuracy(root).runs[0]
    predicted = one.predicted._replace(step_time_s=1.0, interval=Interval(0.9, 1.1))
    off = lambda *measured: [one._replace(predicted=predicted, measured_s=seconds) for seconds in measured]
    assert (
        inside_text(off(0.8)) == "1 step-time prediction checked so far on this machine, with an error of 25%"
    )
    assert (
        inside_text(off(0.8, 1.0))
        == "2 step-time predictions checked so far on this machine, with errors of 0 to 25%"
    )
    many = "9 of 10 step times on this machine inside their 90% prediction interval"
    assert inside_text(off(0.8, *[1.0] * 9)) == many
    assert Accuracy(tuple(off(0.8, *[1.0] * 9))).headline == (
        f"{many}; median error of 10 runs, predicted at launch: 0.0%."
    )
