"""A run beside its prediction: the figure, the Training Lab's panel, and the report's last section."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardscope.calibration.host_calibration import HostCalibration, HostMachine, save, saved
from shardscope.errors import LaunchError
from shardscope.measure.compare.comparison import Comparison, overview, state_of
from shardscope.runtime.record.launch_prediction import LaunchPrediction
from shardscope_widgets import demo, figures, write_report
from shardscope_widgets.figures import _predicted
from shardscope_widgets.training_lab import _outcome
from shardscope_widgets.training_lab._outcome import OutcomePanel
from shardscope_widgets.training_lab._words import ranks_text, status_text
from shardscope_widgets.words import duration_text
from widgets.fake_runs import fake_run, step_events
from widgets.made_comparison import made_comparison


def test_bars_are_of_one_unit_in_each_panel_without_sums_messages_and_single_collectives() -> None:
    traffic, memory, time = _predicted.compared_info(made_comparison()).panels
    assert (traffic.unit, traffic.terms) == ("kB", ("ring_all_reduce", "all_gather"))
    assert traffic.values == {"predicted": (4.096, 1.024), "measured": (4.096, 2.048)}
    assert traffic.errors == ("exact", "-50%")
    assert (memory.unit, memory.terms) == ("MB", ("parameters", "activations"))
    assert (time.unit, time.terms) == ("ms", ("forward", "communication", "step"))
    assert time.hover["measured"] == ("5 ms", "2 ms", "20 ms")


def test_each_panel_has_a_bar_for_each_column_and_each_term_its_error() -> None:
    found = figures.compared(made_comparison())
    assert [bar.name for bar in found.data] == ["predicted", "measured"] * 3
    assert sum(bar.showlegend for bar in found.data) == 2
    texts = [note.text for note in found.layout.annotations]
    assert {"exact", "-50%", "+50%", "-75%", "<b>Memory</b>"} <= set(texts)
    with_twin = figures.compared(made_comparison(simulated_s=0.01))
    names = [bar.name for bar in with_twin.data]  # only the step was simulated
    assert names == ["predicted", "measured"] * 2 + ["predicted", "simulated", "measured"]
    assert [bar.name for bar in figures.compared(made_comparison(simulated_s=0.005)).data] == names[:2] * 3
    assert with_twin.data[-2].x[-1] == 10.0


def test_the_report_has_a_section_on_predictions_if_there_are_comparisons(tmp_path: Path) -> None:
    runs = [fake_run("ring", 2, steps=9)]
    assert "Predicted and measured" not in write_report(runs, tmp_path / "plain.html").read_text()
    page = write_report(runs, tmp_path / "all.html", comparisons=[made_comparison("<b>x</b>")]).read_text()
    assert "<b>x</b>" not in page
    section = page[page.index('<h2 id="predicted-and-measured">') :]
    assert "<td>&lt;b&gt;x&lt;/b&gt;</td><td>-50%</td><td>exact</td><td>exact</td><td>+50%</td>" in section
    assert "A note &lt;of&gt; its own." in section


def test_the_demo_prints_what_can_be_compared_and_says_why_the_rest_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {"good": made_comparison("good"), "bad": "it has no prediction"}
    monkeypatch.setattr(demo, "comparison_or_reason", lambda run, _prediction: found[run.id])
    runs: Any = [fake_run("ring", 2, steps=9, run_id=name) for name in found]
    demo._report(runs, {}, tmp_path / "demo.html", 3.0)
    said = capsys.readouterr()
    lines = said.out.splitlines()
    (row,) = [line.split("  ") for line in lines if line.lstrip().startswith("good") and "20 ms" in line]
    assert "-75%" in row[-1]
    assert said.err == "bad: it has no prediction\n"
    assert '<h2 id="predicted-and-measured">' in (tmp_path / "demo.html").read_text()


HOST = HostCalibration.shipped().replace(
    name="this machine", machine=HostMachine.here(), load_average=0.0, note="Others."
)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[HostCalibration | Exception]:
    """What the demo's measurements give, one after the other; no calibration is saved yet."""
    found: list[HostCalibration | Exception] = []

    def measure(**_: Any) -> HostCalibration:
        given = found.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "num_gpus", lambda: 0)
    monkeypatch.setattr("shardscope.measure.calibrate.calibrate.calibrate_machine", measure)
    return found


def of_ranks(ranks: int, load: float) -> HostCalibration:
    """A brief calibration of this number of ranks."""
    rows = [row.replace(is_measured=(row.name, row.ranks) == ("slowdown", ranks)) for row in HOST.constants]
    return HOST.replace(is_brief=True, load_average=load, constants=tuple(rows))


BUSY = 50.0 * HOST.machine.cores


@pytest.mark.parametrize(
    ("known", "new", "kept"),
    [
        (None, of_ranks(4, BUSY), "new"),
        (HOST, None, "known"),
        (HOST.replace(load_average=BUSY), None, "known"),
        (of_ranks(4, 0.0), None, "known"),
        (of_ranks(4, BUSY), of_ranks(4, 0.0), "new"),
        (of_ranks(4, BUSY), of_ranks(4, 2 * BUSY), "known"),
        (of_ranks(2, 0.0), of_ranks(4, BUSY), "new"),
    ],
)
def test_the_demo_measures_what_it_needs_and_replaces_only_its_own_calibrations_by_better_ones(
    measured: list[Any], known: HostCalibration | None, new: HostCalibration | None, kept: str
) -> None:
    if known is not None:
        save(known)
    measured += [new] if new is not None else []
    demo.calibrate_once(4)
    assert measured == []
    assert saved() == {"known": known, "new": new}[kept]


def test_the_demo_goes_on_if_the_machine_cannot_be_measured(
    measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    measured += [LaunchError("no rank starts")] * 2
    demo.calibrate_once(4)
    assert capsys.readouterr().err == "Predictions use constants from another machine: no rank starts\n"
    save(of_ranks(4, BUSY))
    demo.calibrate_once(4)
    assert (
        capsys.readouterr().err
        == "Predictions use constants from an earlier measurement of this machine: no rank starts\n"
    )


def test_the_demo_measures_nothing_that_it_cannot_save_or_use(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    demo.calibrate_once(4)
    assert "cannot be saved; set SHARDSCOPE_CACHE" in capsys.readouterr().err
    (tmp_path / "cache").unlink()
    monkeypatch.setattr(demo, "num_gpus", lambda: 1)
    demo.calibrate_once(4)
    assert measured == []
    assert capsys.readouterr().out == ""


def test_steps_outside_their_interval_are_marked() -> None:
    rows = made_comparison().rows
    inside, outside = (
        replace(made_comparison(), rows=(*rows[:-1], replace(rows[-1], interval=ends)))
        for ends in ((0.01, 0.03), (0.004, 0.007))
    )
    right = [row for row in rows if row.agrees is not False]
    assert [state_of(replace(each, rows=(*right, each.rows[-1]))) for each in (inside, outside)] == [
        "completed",
        "warning",
    ]
    assert state_of(inside) == "failed"  # bytes disagree
    assert "outside the 90% prediction interval: it was hot" in replace(outside, reason="it was hot").verdict
    (good, bad, without) = overview([inside, outside, made_comparison()])
    assert good[-3:] == ["10 ms to 30 ms", "20 ms", "-75%"]
    assert bad[-3:] == ["4 ms to 7 ms", "20 ms", "-75% *"]
    assert without[-3:] == ["-", "20 ms", "-75%"]
    said = "The measured time of a step is outside the 90% prediction interval, 4 ms to 7 ms."
    assert said in repr(outside)
    assert said in outside._repr_html_()
    assert "90% interval" not in repr(made_comparison())
    assert outside.frame()[["interval_low", "interval_high"]].dropna().to_numpy().tolist() == [[0.004, 0.007]]
    assert "interval_low" not in made_comparison().frame()


class TestOutcome:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The runs that have been compared."""
        names: list[str] = []

        def compare(run: Any, *, job: Any) -> Comparison | str:
            names.append(run.id)
            return "it has no <prediction>" if run.id == "bad" else made_comparison(run.id)

        monkeypatch.setattr(_outcome, "comparison_or_reason", compare)
        return names

    def test_nothing_is_compared_before_the_lab_is_seen(self, asked: list[str]) -> None:
        outcome = OutcomePanel()
        outcome.want(run_of("a"))
        assert outcome._thread is None
        outcome.begin()
        outcome.wait(60)
        assert asked == ["a"]
        assert outcome.found is not None
        assert "a compared with its prediction" in outcome.words.value
        assert outcome.figure.layout.display is None
        assert [bar["name"] for bar in outcome.figure.traces][:2] == ["predicted", "measured"]

    def test_a_run_is_compared_once_and_cleared_while_another_trains(self, asked: list[str]) -> None:
        outcome = OutcomePanel()
        outcome.begin()
        for _ in range(3):
            outcome.want(run_of("a"))
            outcome.wait(60)
        assert asked == ["a"]
        outcome.want(None)
        assert "Once the selected run has ended" in outcome.words.value
        assert outcome.figure.layout.display == "none"

    def test_a_reason_takes_the_place_of_the_figure(self, asked: list[str]) -> None:
        outcome = OutcomePanel()
        outcome.begin()
        outcome.want(run_of("bad"))
        outcome.wait(60)
        assert "it has no &lt;prediction&gt;" in outcome.words.value
        assert (outcome.found, outcome.figure.layout.display, asked) == (None, "none", ["bad"])

    def test_an_error_of_any_kind_takes_the_place_of_the_figure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(run: Any, *, job: Any) -> Comparison:
            raise KeyError(run.id)

        monkeypatch.setattr(_outcome, "comparison_or_reason", fail)
        outcome = OutcomePanel()
        outcome.begin()
        outcome.want(run_of("<broken>"))
        outcome.wait(60)
        assert (
            "cannot be compared with its prediction: KeyError: &#x27;&lt;broken&gt;&#x27;"
            in outcome.words.value
        )
        assert (outcome.found, outcome.figure.layout.display) == (None, "none")

    def test_only_the_newest_run_is_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        go, begun, names = threading.Event(), threading.Event(), []

        def compare(run: Any, *, job: Any) -> Comparison:
            names.append(run.id)
            begun.set()
            assert go.wait(60)
            return made_comparison(run.id)

        monkeypatch.setattr(_outcome, "comparison_or_reason", compare)
        outcome = OutcomePanel()
        outcome.begin()
        outcome.want(run_of("a"))
        assert begun.wait(60)
        outcome.want(run_of("b"))
        outcome.want(run_of("c"))
        go.set()
        outcome.wait(60)
        assert outcome.found is not None
        assert outcome.found.label == "c"
        assert (names[0], names[-1]) == ("a", "c")

    def test_the_lab_compares_the_run_in_focus_once_it_has_ended(self, asked: list[str], lab: Any) -> None:
        outcome = lab.screen.outcome
        outcome.begin()
        first = lab.start()
        first.write(step_events("ring", 2, 1))
        lab.refresh()
        assert asked == []
        first.state = "completed"
        lab.refresh()
        outcome.wait(60)
        assert outcome.found.label == first.id
        lab.start()
        assert outcome.found is None
        assert "Once the selected run has ended" in outcome.words.value
        lab.shown = [first.id]
        outcome.wait(60)
        assert asked == [first.id, first.id]


def run_of(name: str) -> Any:
    return fake_run("ring", 2, steps=3, run_id=name)


def _after_seven_steps(lab: Any) -> Any:
    run = lab.start()
    for step in range(1, 8):
        run.write(step_events("ring", 2, step))
    lab.refresh()
    return lab._book.entries[lab.focus]


def test_a_wrong_prediction_says_how_to_calibrate_unless_that_was_done(lab: Any) -> None:
    entry, told = _after_seven_steps(lab), "ss.calibrate() does so in under a minute."
    predicted = LaunchPrediction(0.001, None, "another machine", is_calibrated=False)
    for is_calibrated in (False, True):
        entry._predicted = {True: predicted._replace(is_calibrated=is_calibrated)}
        assert (told in status_text(entry, 0.001)) is not is_calibrated
        assert (told in ranks_text(entry, "", 10.0)) is not is_calibrated
        assert told not in ranks_text(entry, "", 0.001)  # the status says so
    assert told not in status_text(entry, entry.trace.step_time_s)  # as predicted


def test_the_step_that_is_played_is_named_beside_the_median(lab: Any) -> None:
    entry = _after_seven_steps(lab)
    median, shown = entry.trace.step_time_s, SimpleNamespace(step=2, step_time_s=0.743)
    told = f"The median step takes {duration_text(median)}, as predicted; step 2, which is played here, took 743 ms."
    assert told in ranks_text(entry, "", median, shown)
