"""A finished run's prediction stays what it was at its launch; a newer one stands beside it, by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.runs import small_job
from shardscope.calibration import host_calibration
from shardscope.calibration.host_calibration import HostCalibration, HostMachine
from shardscope.calibration.this_machine import CoreSpeed, core_speed
from shardscope.cli import main
from shardscope.machine import Place
from shardscope.measure.compare.comparison import Comparison, state_of
from shardscope.measure.compare.of_run import comparison_or_reason
from shardscope.prediction import rates
from shardscope.runtime.launcher.preflight import preflight_of
from shardscope.runtime.record.launch_prediction import FILE, LaunchPrediction
from shardscope.spec.units import figure
from shardscope_widgets.figures import compared
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab._runbook import RunEntry
from shardscope_widgets.training_lab._words import status_state, status_text
from shardscope_widgets.twin._findings import AS_RUN, Findings


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> ss.Run:
    job = small_job(strategy="ring", steps=12)
    return ss.launch(job, root=tmp_path_factory.mktemp("runs")).wait(110)


@pytest.fixture
def run(launched: ss.Run, tmp_path: Path) -> ss.Run:
    """A copy, whose files a test may change."""
    return ss.Run.attach(shutil.copytree(launched.path, tmp_path / launched.path.name))


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostCalibration:
    """A calibration of this machine that is saved now, with constants far from the shipped ones."""
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path / "cache"))
    shipped = HostCalibration.shipped()
    constants = tuple(
        row.model_copy(update={name: 2 * getattr(row, name) for name in ("value", "low", "high")})
        for row in shipped.constants
        if row.name != "link_efficiency"
    )
    kept = tuple(row for row in shipped.constants if row.name == "link_efficiency")
    found = shipped.replace(
        machine=HostMachine.here(), constants=(*constants, *kept), measured_at="2026-11-30 10:00"
    )
    host_calibration.save(found)
    return found


def step(comparison: Comparison | str) -> list[float]:
    """The predicted time of a step, and its interval."""
    assert not isinstance(comparison, str)
    row = comparison["time", "step"]
    return [row.predicted, *(row.interval or ())]


def recorded(run: ss.Run) -> list[float]:
    assert run.predicted is not None
    return [run.predicted.step_time_s, *(run.predicted.interval or ())]


def slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session in which this machine's cores are timed under load."""
    now = core_speed()
    monkeypatch.setattr(rates, "core_speed", lambda: CoreSpeed(now.flops / 3, now.bandwidth / 2))


def test_all_constants_are_in_the_run_directory_as_json(run: ss.Run) -> None:
    found = json.loads((run.path / FILE).read_text())
    assert HostCalibration.from_fields(found["calibration"]) == HostCalibration.shipped()
    assert found["cores"] > 0
    assert found["load_at_end"] >= 0
    known = run.predicted
    assert known is not None
    assert step(ss.compare(run)) == pytest.approx(recorded(run))


def test_a_session_that_times_the_cores_anew_predicts_the_same(
    run: ss.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rows = step(ss.compare(run)), [row.predicted for row in ss.compare(run).rows]
    slower(monkeypatch)
    assert ss.predict(run.job).step_time_s > 1.1 * before[0]
    assert step(ss.compare(run)) == pytest.approx(before)
    assert [row.predicted for row in ss.compare(run).rows] == pytest.approx(rows)
    assert "now" not in ss.compare(run).columns  # they are the same constants


def test_a_calibration_made_since_is_a_second_column(run: ss.Run, calibrated: HostCalibration) -> None:
    known = run.predicted
    assert known is not None
    for found in (ss.compare(run), comparison_or_reason(run), Findings.of(run, AS_RUN).comparison):
        assert step(found) == pytest.approx(recorded(run))
        assert not isinstance(found, str)
        assert found["time", "step"].now == pytest.approx(ss.predict(run.job).step_time_s)
        assert found["time", "step"].now != pytest.approx(known.step_time_s, rel=0.05)
        assert found["bytes", "ring_all_reduce"].now is None
        assert f"Predicted now: with constants of {calibrated.label}." in found.notes
        assert f"({figure(known.step_time_s, 's')} predicted)" in found.verdict
    assert "predicted now" in repr(found)
    assert "predicted now" in found._repr_html_()
    assert "now" in found.frame().columns
    assert "predicted now" in {bar.name for bar in compared(found).data}


def test_everything_that_predicts_a_run_again_keeps_to_its_launch(
    run: ss.Run, calibrated: HostCalibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower(monkeypatch)
    known = run.predicted
    assert known is not None
    again = preflight_of(run).prediction
    assert again is not None
    assert again.step_time_s == pytest.approx(known.step_time_s)
    assert again.is_calibrated == known.is_calibrated
    twin = Findings.of(run, AS_RUN).prediction
    assert twin is not None
    assert twin.step_time_s == pytest.approx(known.step_time_s)


def test_the_command_shows_both(
    run: ss.Run, calibrated: HostCalibration, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", str(run.path)])
    out = capsys.readouterr().out
    assert "predicted now" in out
    assert f"with constants of {calibrated.label}" in out
    main(["compare", str(run.path), "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["now"] for row in rows if (row["group"], row["term"]) == ("time", "step")]


def written(run: ss.Run, **changes: object) -> None:
    found = json.loads((run.path / FILE).read_text())
    kept = {name: value for name, value in {**found, **changes}.items() if value is not ...}
    (run.path / FILE).write_text(json.dumps(kept))


def test_a_run_of_an_earlier_version_keeps_its_step_time_and_says_what_is_predicted_now(
    run: ss.Run, calibrated: HostCalibration
) -> None:
    written(run, schema=1, calibration=..., speed=..., cores=..., load_at_end=...)
    known = run.predicted
    assert known is not None
    found = ss.compare(run)
    assert step(found) == recorded(run)
    assert any("its parts are predicted now" in note for note in found.notes)


@pytest.mark.sampled
@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"step_time_s": -1}', '{"step_time_s": "NaN"}'])
def test_a_run_without_a_recorded_prediction_is_predicted_now_and_says_so(
    run: ss.Run, text: str | None
) -> None:
    (run.path / FILE).unlink()
    if text is not None:
        (run.path / FILE).write_text(text)
    found = ss.compare(run)
    assert found["time", "step"].predicted == pytest.approx(ss.predict(run.job).step_time_s)
    assert any("No prediction was recorded when this run was launched" in note for note in found.notes)


@pytest.mark.sampled
@pytest.mark.parametrize("calibration", [[], {}, {"constants": 3}, "x", 1e308])
@pytest.mark.parametrize("speed", [[1.0, 1.0], [0, 1], [1e400, 1], ["x", 1]])
def test_damaged_constants_are_no_constants(run: ss.Run, calibration: object, speed: object) -> None:
    written(run, calibration=calibration, speed=speed)
    known = run.predicted
    assert known is None or known.calibration is None
    assert ss.compare(run)["time", "step"].predicted > 0


def test_what_kept_the_machine_busy_is_said_after_the_end_too(run: ss.Run) -> None:
    written(run, load_at_end=10.2, load=0.4, step_time_s=1e-6, interval=[5e-7, 2e-6])
    note = "System load: 0.4 on"
    found = ss.compare(run)
    assert note in found.conditions
    assert "10.2 at the end of the run. Other programs" in found.conditions
    assert found.conditions in repr(found)
    assert found.conditions in found._repr_html_()
    trace = Trace.of(run)
    trace.feed(run.events())
    entry = RunEntry(run, trace, state="completed")
    text = status_text(entry, run.predicted.step_time_s if run.predicted else None)
    assert "Other programs kept the machine busy: load 10 on" in text
    assert status_state(entry, 1e-6) == "warning"
    assert state_of(found) == "warning"
    assert "outside the 90% prediction interval: other programs kept the machine busy" in found.verdict
    quiet = LaunchPrediction(0.1, None, "x", is_calibrated=False, load_at_end=2.4)
    assert quiet.busy_load(2) == 0


def own_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"model": own_model}, {}], ids=["a model of one's own", "without preflight"]
)
def test_runs_without_a_recorded_step_time_keep_to_the_constants_of_their_launch(
    settings: dict[str, Any], tmp_path: Path, calibrated: HostCalibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = host_calibration.path_of(None).rename(tmp_path / "later")
    run = ss.launch(small_job(**settings), root=tmp_path / "runs", preflight=False).wait(60)
    assert run.predicted is None  # it is not a prediction that `accuracy` could judge
    before = step(ss.compare(run))
    slower(monkeypatch)
    assert step(ss.compare(run)) == pytest.approx(before)
    later.rename(host_calibration.path_of(None))
    found = ss.compare(run)
    assert step(found) == pytest.approx(before)
    assert found["time", "step"].now == pytest.approx(ss.predict(run.job).step_time_s)
    assert f"Predicted now: with constants of {calibrated.label}." in found.notes


@pytest.mark.parametrize("settings", [{"preflight": True}, {"preflight": False}])
def test_a_run_is_predicted_for_the_cores_and_the_transport_of_its_launch(
    settings: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a run directory that was copied to another machine."""
    job = small_job(world_size=4, steps=6, strategy="ring")
    run = ss.launch(job, root=tmp_path / "runs", **settings).wait(60)
    before = preflight_of(run).prediction
    monkeypatch.setattr(Place, "here", lambda: Place(0.5, shares_memory=False))
    after, today = preflight_of(run).prediction, ss.predict(job)
    assert before is not None
    assert after is not None
    assert after.step_time_s == pytest.approx(before.step_time_s)
    assert today.step_time_s is not None
    assert today.step_time_s > 1.5 * (before.step_time_s or 0.0)
    assert step(ss.compare(run))[0] == pytest.approx(before.step_time_s)
