"""The lab without a browser: set traits, click, and look at what it says."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from conformance.runs import wait_for
from shardscope.errors import RunFailed, SpecError
from shardscope.runlog.schema import Moved
from shardscope.runtime.record.listing import Skipped
from shardscope.runtime.record.status import Cause
from shardscope.spec import Optimizer
from shardscope_widgets.figures import _overview
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab._runbook import RunBook
from shardscope_widgets.training_lab._words import status_text
from widgets.fake_runs import fake_run, step_events


def finish_steps(lab, run, *steps):
    for step in steps:
        run.write(step_events(run.job.strategy.name, run.job.world_size, step))
    lab.refresh()


class TestChoosing:
    def test_a_trait_moves_its_control_and_the_other_way_round(self, lab):
        lab.strategy = "all-reduce"
        assert lab.screen.controls["strategy"].value == "all-reduce"
        lab.screen.controls["world_size"].value = 4
        assert lab.job().world_size == 4

    def test_every_control_has_a_description_and_a_tooltip(self, lab):
        assert all(control.description and control.tooltip for control in lab.screen.controls.values())

    def test_an_unknown_name_is_refused_with_the_nearest(self, lab):
        with pytest.raises(SpecError, match="did you mean 'ring'"):
            lab.strategy = "rnig"
        assert lab.strategy == "ring"

    def test_choosing_a_model_brings_data_that_it_can_read(self, lab):
        lab.model = "cnn"
        assert lab.data == "digits"
        lab.data = "python-source"
        assert lab.model.startswith("gpt")

    def test_choosing_an_optimizer_brings_its_learning_rate(self, lab):
        lab.optimizer = "sgd"
        assert lab.lr == 0.1

    def test_a_single_process_takes_one_rank_and_gives_the_others_back(self, lab):
        lab.world_size = 4
        lab.strategy = "single"
        assert lab.job().world_size == 1
        lab.strategy = "ring"
        assert lab.job().world_size == 4

    def test_a_job_that_cannot_exist_cannot_be_started(self, lab):
        lab.global_batch = 31
        assert lab.screen.start.disabled
        assert "batch.global_batch=31 is not divisible by world_size=2" in lab.screen.plan.value
        lab.global_batch = 32
        assert not lab.screen.start.disabled

    def test_a_function_of_the_users_is_one_more_option(self, make_lab):
        def my_model():
            raise AssertionError("only its name is looked at")

        lab = make_lab(model=my_model, data="digits")
        assert ("my_model", my_model) in lab.screen.controls["model"].options
        assert lab.job().model.name == "my_model"

    def test_a_function_that_is_given_later_leaves_the_data_as_they_are(self, lab):
        lab.model = test_importing_the_package_loads_neither_plotly_nor_ipywidgets
        assert lab.screen.controls["model"].value is lab.model
        assert lab.data == "python-source"

    def test_an_unknown_choice_is_an_error(self, make_lab):
        with pytest.raises(TypeError, match="no option 'modle'"):
            make_lab(modle="mlp")

    def test_once_it_is_seen_it_tells_beforehand_what_starting_would_take(self, lab):
        forecast = lab.screen.forecast
        assert forecast.line.value == ""
        forecast.begin()
        forecast.wait(60)
        text = forecast.line.value
        assert "for 200 steps, once the ranks have started." in text
        assert "Each rank sends 882 kB per step and needs " in text
        assert "on this machine. Comput" in text or "on this machine. Communication" in text
        assert forecast.anyway.layout.display == "none"

    def test_what_does_not_fit_is_started_only_where_one_says_so(self, lab, monkeypatch):
        forecast = lab.screen.forecast
        forecast.begin()
        monkeypatch.setattr("shardscope.runtime.launcher.preflight.usable_memory_bytes", lambda: 1e6)
        lab.global_batch = 512
        forecast.wait(60)
        assert "It does not fit" in forecast.line.value
        assert forecast.anyway.layout.display is None
        lab.global_batch = 2**30
        forecast.wait(60)
        assert ">global_batch=1073741824 is out of range for data with" in forecast.line.value
        lab.global_batch = 31
        assert (forecast.line.value, forecast.anyway.layout.display) == ("", "none")


class TestRunning:
    def test_constructing_starts_nothing(self, lab, runtime):
        assert runtime.known == []
        assert lab.run is None
        assert lab.status == "Ready. Press a button above, or choose a job and press Start."

    def test_code_can_wait_for_the_run_in_focus(self, lab):
        assert not lab.is_running
        assert lab.wait()
        run = lab.start()
        assert lab.is_running
        assert not lab.wait(0.05)
        threading.Timer(0.1, run.stop).start()
        assert lab.wait(60)
        assert not lab.is_running
        assert "was stopped" in lab.status

    def test_start_shows_the_run_as_it_goes(self, lab):
        lab.steps = 50
        lab.screen.start.click()
        assert lab.status.startswith("ring-gpt-nano is ")
        finish_steps(lab, lab.run, 1, 2, 3)
        assert "step 3 of 50" in lab.status
        bold = lab.screen.live.overview.traces[1]
        assert (bold["name"], tuple(bold["x"]), len(bold["y"])) == ("ring-gpt-nano", (1, 2, 3), 3)
        assert "ring-gpt-nano, steps 2 to 3" in lab.screen.live.words.value

    def test_a_run_that_is_far_slower_than_predicted_says_so_with_the_load(self, lab, monkeypatch):
        monkeypatch.setattr("psutil.getloadavg", lambda: (13.2, 9.0, 5.0))
        finish_steps(lab, lab.start(), *range(1, 8))
        entry = lab._book.entries[lab.focus]
        assert "Slower" not in status_text(entry, entry.trace.step_time_s / 1.9)
        text = status_text(entry, entry.trace.step_time_s / 2.1)
        assert "Slower than predicted: 6" in text
        assert "Other programs keep the machine busy: load 13 on " in text
        monkeypatch.setattr("psutil.getloadavg", lambda: (2.0, 9.0, 5.0))
        assert "busy" not in status_text(entry, entry.trace.step_time_s / 2.1)
        finish_steps(lab, lab.run, 8)
        lab.run.state = "completed"
        lab.refresh()
        text = status_text(entry, entry.trace.step_time_s / 2.1)
        assert "Other programs kept the machine busy: load 13 on " in text  # as last seen during the run
        assert "busy" not in status_text(replace(entry, busy_load=0.0), entry.trace.step_time_s / 2.1)

    def test_stop_returns_at_once_and_says_so_when_it_is_done(self, lab):
        run = lab.start()
        done = threading.Event()
        stop = run.stop
        run.stop = lambda: (stop(), done.set())
        lab.screen.stop.click()
        assert done.wait(60)
        lab.refresh()
        assert "was stopped" in lab.status
        assert lab.screen.stop.disabled

    def test_a_failed_run_names_the_rank_and_hides_nothing(self, lab):
        run = lab.start()
        run.state = "failed"
        run.error = RunFailed("boom <b>", rank=1, step=3, strategy="ring", traceback="Traceback: line <1>")
        lab.refresh()
        assert "rank 1 failed at step 3" in lab.problem
        assert "boom &lt;b&gt;" in lab.problem
        assert "line &lt;1&gt;" in lab.problem
        assert lab.screen.problem.value == lab.problem

    def test_an_error_in_a_callback_shows_in_the_lab(self, lab, monkeypatch):
        monkeypatch.setattr("shardscope.runtime.launch", lambda *_, **__: 1 / 0)
        lab.screen.start.click()
        assert "ZeroDivisionError" in lab.problem

    def test_an_error_while_stopping_shows_in_the_lab(self, lab):
        run = lab.start()
        run.stop = lambda: 1 / 0
        lab.screen.stop.click()
        for thread in threading.enumerate():
            if thread.name == "shardscope-stop":
                thread.join(60)
        assert "ZeroDivisionError" in lab.problem

    def test_two_runs_of_one_name_are_told_apart(self, lab):
        lab.start()
        lab.start()
        assert [row.label for row in (lab._book.entries[run.id].trace for run in lab.runs)] == [
            "ring-gpt-nano (2)",
            "ring-gpt-nano",
        ]
        assert lab.shown == [lab.runs[0].id]

    def test_the_driver_sees_news_by_itself(self, lab):
        run = lab.start()
        run.write(step_events("ring", 2, 1))
        wait_for(lambda: "step 1 of" in lab.status)


class TestHistory:
    def test_a_new_lab_finds_all_runs_and_follows_those_that_run(self, make_lab):
        first = make_lab()
        run = first.start()
        finish_steps(first, run, 1, 2)
        again = make_lab()
        assert again.run is run
        assert "step 2 of" in again.status
        finish_steps(again, run, 3)
        assert "step 3 of" in again.status

    @pytest.mark.parametrize("group", ["gpt-nano on python-source", "mlp on digits"])
    def test_a_lab_with_earlier_runs_follows_the_next_one_that_starts(self, make_lab, runtime, group):
        runtime.known = [fake_run(run_id="old", steps=2)]
        runtime.known[0].group = "mlp on digits"
        lab = make_lab()
        assert (lab.focus, lab.shown) == ("old", ["old"])
        for name in ("new", "newer"):
            run = fake_run(run_id=name, steps=2)
            run.state, run.group = "running", group
            runtime.known.append(run)
            lab.refresh()
            assert (lab.focus, lab.group, lab.shown[-1]) == ("new", group, "new")

    def test_ticking_lays_runs_over_each_other(self, make_lab, runtime):
        runtime.known = [fake_run("ring", 2, steps=3, run_id=f"run-{n}") for n in range(6)]
        lab = make_lab()
        assert lab.shown == ["run-2", "run-3", "run-4", "run-5"]
        lab.screen.history._rows["run-0"].tick.value = True
        assert lab.shown[-1] == "run-0"
        lab.screen.history._rows["run-3"].tick.value = False
        assert "run-3" not in lab.shown
        names = [trace["name"] for trace in lab.screen.live.overview.traces[1 :: _overview.TRACES_A_RUN]]
        assert sorted(names) == [f"ring-gpt-nano{number}" for number in ("", " (3)", " (5)", " (6)")]

    def test_runs_are_named_by_what_differs_in_legend_list_and_table(self, make_lab, runtime):
        rates = [Optimizer("adamw", lr=lr) for lr in (0.1, 0.01)]
        runtime.known = [
            fake_run("ring", 2, steps=3, run_id=f"run-{n}", optimizer=rate) for n, rate in enumerate(rates)
        ]
        lab = make_lab()
        bold = lab.screen.live.overview.traces[1 :: _overview.TRACES_A_RUN]
        assert [trace["name"] for trace in bold] == ["lr 0.1", "lr 0.01"]
        assert len({trace["line"]["color"] for trace in bold}) == 2
        rows = lab.screen.history._rows
        assert [rows[f"run-{n}"].tick.description for n in (0, 1)] == ["lr 0.1", "lr 0.01"]
        assert all(
            text in lab.screen.table.table.value for text in (">lr</th>", "lr 0.1 (baseline)<", "lr 0.01<")
        )
        assert "lr 0.01 has finished: step 3 of 3, loss " in lab.status

    def test_unticking_the_last_run_leaves_none_ticked_and_the_list_keeps_its_loss(self, make_lab, runtime):
        runtime.known = [fake_run("ring", 2, steps=3, run_id=f"run-{n}") for n in range(5)]
        lab = make_lab()
        lab.shown = []
        lab.refresh()
        assert lab.shown == []
        layout = lab.screen.live.overview.figure["layout"]
        assert layout["xaxis"]["range"] == [0, 1]
        assert all("loss " in row.about.value for row in lab.screen.history._rows.values())
        lab.shown = ["run-1"]
        assert lab.screen.live.overview.figure["layout"]["xaxis"]["autorange"] is True
        lab.screen.history._rows["run-1"].tick.value = False
        lab.refresh()
        assert lab.shown == []

    def test_runs_of_other_models_are_another_group_that_never_shares_the_plots(self, make_lab, runtime):
        other = fake_run("ring", 2, steps=3, run_id="mlp", model="mlp", data="digits")
        other.group = "mlp on digits"
        runtime.known = [*(fake_run("ring", 2, steps=3, run_id=f"run-{n}") for n in range(2)), other]
        lab = make_lab()
        assert (lab.group, lab.shown) == ("mlp on digits", ["mlp"])
        lab.screen.history.groups.value = "gpt-nano on python-source"
        assert lab.shown == ["run-0", "run-1"]
        lab.shown = ["run-0", "mlp"]
        assert (lab.group, lab.shown) == ("mlp on digits", ["mlp"])

    def test_runs_of_tools_are_listed_only_when_asked_for(self, make_lab, runtime):
        mine, checked = (fake_run("ring", 2, steps=3, run_id=name) for name in ("mine", "checked"))
        checked.made_by = "check"
        runtime.known = [mine, checked]
        lab = make_lab()
        assert [run.id for run in lab.runs] == ["mine"]
        lab.screen.history.tools.value = True
        assert [run.id for run in lab.runs] == ["checked", "mine"]

    def test_a_diverged_run_is_flagged_in_list_status_and_table(self, make_lab, runtime):
        run = fake_run("ring", 2, steps=9)
        for event in run.all_events:
            if event["event"] == "step" and event["step"] > 4:
                event["loss"] = 500.0 * event["step"]
        runtime.known = [run]
        lab = make_lab()
        assert "▲ It diverged at step 5: its loss is 4,500.0" in lab.status
        assert "▲ diverged" in lab.screen.history._rows[run.id].about.value
        assert "▲ diverged" in lab.screen.live.legend.value
        assert "▲ diverged at step 5" in lab.screen.table.table.value

    def test_the_baseline_is_the_run_that_a_run_follows_until_one_is_chosen(self, make_lab, runtime):
        runtime.known = [fake_run("ring", 2, steps=3, run_id=f"run-{n}", seed=n) for n in range(3)]
        lab = make_lab()
        table = lab.screen.table
        assert table.baseline.value == "run-0"
        runtime.known[2].baseline = "run-1"
        lab.refresh()
        assert table.baseline.value == "run-1"
        table.baseline.value = ""
        lab.refresh()
        assert "Changes are relative to" not in table.table.value

    def test_a_baseline_notes_and_deleting_with_a_question(self, make_lab, runtime):
        runtime.known = [fake_run("ring", 2, steps=3, run_id=f"run-{n}", seed=n) for n in range(2)]
        lab = make_lab()
        table = lab.screen.table
        table.baseline.value = "run-0"
        assert "Changes are relative to ring-gpt-nano." in table.table.value
        table.run.value = "run-1"
        table.note.value = "the <good> one"
        assert runtime.known[1].note == "the <good> one"
        lab.refresh()
        assert "the &lt;good&gt; one" in table.table.value
        table.delete.click()
        assert not runtime.known[1].is_deleted
        assert "run-1" in table.message.value
        table.confirm.click()
        assert runtime.known[1].is_deleted
        assert lab.shown == ["run-0"]
        runtime.known[0].state = "running"
        table.confirm.click()
        assert not runtime.known[0].is_deleted
        assert "has not ended" in table.message.value

    def test_the_loss_axis_and_the_smoothing_can_be_changed(self, make_lab, runtime):
        runtime.known = [fake_run("ring", 2, steps=30)]
        live = make_lab().screen.live
        live.log.value = True
        assert live.overview.figure["layout"]["yaxis"]["type"] == "log"
        live.smoothing.value = 25
        assert "25-step average" in live.overview.figure["layout"]["annotations"][0]["text"]

    def test_the_focus_can_be_chosen(self, make_lab, runtime):
        runtime.known = [fake_run("ring", 2, steps=3, run_id=f"run-{n}") for n in range(2)]
        lab = make_lab()
        lab.screen.live.focus.value = "run-0"
        assert lab.run.id == "run-0"
        assert lab.screen.live.words.value.startswith('<div class="ss-words">ring-gpt-nano, steps')

    @pytest.mark.slow
    def test_runs_that_cannot_be_read_are_told_of_in_one_quiet_line(self, make_lab, runtime):
        runtime.known = [fake_run("ring", 2, steps=3)]
        lab = make_lab()
        assert lab.screen.history._note.value == ""
        runtime.skipped = [Skipped("<b>bad</b>", "job.json is missing")]
        lab.refresh()
        assert len(lab.runs) == 1
        assert "1 run could not be read: &lt;b&gt;bad" in lab.screen.history._note.value

    def test_side_by_side_escapes_what_users_wrote(self, make_lab, runtime):
        runtime.known = [fake_run("ring", 2, steps=3, name="<script>alert(1)</script>")]
        html = make_lab().screen.table.table.value
        assert "<script>" not in html
        assert "&lt;script&gt;" in html


class TestLiveFigure:
    def test_what_is_put_lies_over_the_template_and_nothing_of_before_stays(self):
        import plotly.graph_objects as go

        figure = LiveFigure(go.Figure([go.Scatter(xaxis="x2"), go.Scatter()], {"yaxis": {"range": [0, 1]}}))
        figure.put([{"y": (1,)}, {"y": (2,)}], {"annotations": [{"text": "a"}, {"text": "b"}]})
        figure.put([{"y": (3,), "name": "now"}], {"annotations": [], "yaxis": {"tickvals": [1]}})
        assert figure.traces == [{"type": "scatter", "xaxis": "x2", "y": (3,), "name": "now"}]
        assert figure.figure["layout"]["annotations"] == []
        assert figure.figure["layout"]["yaxis"] == {"range": [0, 1], "tickvals": [1]}

    def test_a_page_that_opens_now_gets_what_is_shown_now(self):
        import plotly.graph_objects as go

        figure = LiveFigure(go.Figure([go.Scatter()]))
        figure.put([{"y": (1,)}], {})
        assert figure.get_state()["figure"]["data"][0]["y"] == (1,)

    def test_all_figures_share_one_library(self):
        import plotly.graph_objects as go

        assert LiveFigure(go.Figure()).library is LiveFigure(go.Figure()).library
        assert len(LiveFigure._esm) < 6_000


@pytest.mark.slow
def test_the_lab_has_loaded_what_plotly_looks_for_while_another_thread_may_be_importing_it():
    code = "import sys, shardscope_widgets.training_lab; print('numpy' in sys.modules and 'pandas' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "True"


def test_importing_the_package_loads_neither_plotly_nor_ipywidgets():
    heavy = "('plotly', 'ipywidgets', 'torch')"
    code = f"import sys, shardscope_widgets; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[]"


def test_late_traffic_of_a_step_that_could_not_be_read_is_shown_all_the_same():
    rows = {"send": {"sent_bytes": 7, "received_bytes": 3}}
    trace = Trace.of(fake_run("ring", 2, steps=1))
    assert trace.feed([{"event": "traffic", "t": 1.0, "rank": 0, "step": 1, "traffic": rows}])
    assert trace.links[0] == Moved(sent_bytes=7, received_bytes=3)


def test_a_run_that_cannot_be_shown_becomes_a_note_and_stops_no_other(runtime):
    good, bad = fake_run("ring", 2, steps=3, run_id="good"), fake_run("ring", 2, steps=3, run_id="bad")
    runtime.known = [good, bad]
    book = RunBook()
    book.find()
    book.entries["bad"].trace.feed = lambda _events: {}[0]
    assert book.poll(["bad", "good"]) == {"bad", "good"}
    assert book.entries["good"].trace.steps
    assert book.poll(["bad"]) == set()
    book.find()
    assert book.skipped == "1 run could not be read: bad (KeyError: 0)"


def test_a_run_that_cannot_be_entered_hides_no_other(runtime, monkeypatch):
    runtime.known = [fake_run("ring", 2, steps=3, run_id=name) for name in ("good", "bad")]
    monkeypatch.setattr(Trace, "of", lambda run, really=Trace.of: really(run) if run.id == "good" else 1 / 0)
    book = RunBook()
    book.find()
    assert list(book.entries) == ["good"]
    assert "bad (ZeroDivisionError" in book.skipped


@pytest.mark.parametrize(("saved", "button"), [(None, "Start again"), (10, "Resume")])
def test_a_run_that_ended_with_its_kernel_is_explained_and_goes_on_by_a_button(lab, runtime, saved, button):
    run = fake_run("ring", 2, steps=20)
    run.state, run.cause, run.reason, run.newest_checkpoint = (
        "stopped",
        Cause.DRIVER_ENDED,
        "the program ended",
        saved,
    )
    runtime.known.append(run)
    lab.refresh()
    lab.focus = run.id
    assert "It ended with the kernel or program that launched it." in lab.status
    offer = lab.screen.resumer
    assert [offer.box.layout.display, offer.button.description] == [None, button]
    offer.button.click()
    assert [len(runtime.known), lab.focus] == [2, runtime.known[-1].id]
    run.cause, run.newest_checkpoint = Cause.REQUESTED, None
    lab.screen._offered = None
    lab.focus = run.id
    lab.refresh()
    assert "ended, and its runs" not in lab.status
    assert offer.box.layout.display == "none"
