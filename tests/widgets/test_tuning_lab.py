"""The Tuning Lab without a browser: what is searched, what is said, what a real study of a few trials shows."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

import shardscope as ss
from shardscope.errors import SpecError, StudyError
from shardscope.runtime.launcher.preflight import about, preflight
from shardscope.spec.space import Space
from shardscope.tuning.priors import default_space
from shardscope.tuning.progress import Pace
from shardscope.tuning.session import StudySession
from shardscope_widgets.figures._trials import TrialInfo
from shardscope_widgets.tuning_lab import _search
from shardscope_widgets.tuning_lab._code import job_code
from shardscope_widgets.tuning_lab._study import Shown
from shardscope_widgets.tuning_lab._words import status_text

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=6)
SPACE = Space({"optimizer.lr": (1e-3, 1e-1, "log"), "compression": ["none", "int8"]})


def named(lab, name):
    return next(row for row in lab._rows if row.name == name)


def test_steps_of_a_trial_follow_its_settings_as_they_are_suggested():
    """The lab may read a trial that runs before its batch is suggested, and takes it for one of the job's own."""
    kept = Shown(SimpleNamespace(definition=SimpleNamespace(job=JOB, equal="samples")))
    first = SimpleNamespace(number=0, state="running", params={})
    assert kept._steps_of(first) == JOB.steps
    whole = SimpleNamespace(number=0, state="running", params={"batch": 2 * JOB.batch.global_batch})
    assert kept._steps_of(whole) == JOB.steps // 2


class TestSearching:
    def test_the_default_rows_give_the_default_space(self):
        rows = _search.rows_of(JOB)
        assert _search.space_of(rows, _search.first_state(rows), JOB) == default_space(JOB)

    def test_rows_of_a_space_give_that_space(self):
        space = Space(
            {"optimizer.lr": (3e-4, 0.07, "log"), "batch": ss.PowersOfTwo(32, 128), "compression": ["topk", "none"],
             "compression[topk].ratio": (0.013, 0.4), "seed": [3, 5]}
        )  # fmt: skip
        rows = _search.rows_of(JOB, space)
        assert _search.space_of(rows, _search.first_state(rows), JOB) == space

    def test_a_setting_of_a_choice_that_is_not_picked_is_hidden_and_not_searched(self):
        rows = _search.rows_of(
            JOB, Space({"compression": ["none", "topk"], "compression[topk].ratio": (0.01, 0.1)})
        )
        state = _search.first_state(rows)
        state["compression"]["picked"] = state["compression"]["picked"][:1]
        assert "compression[topk].ratio" in _search.hidden(rows, state, JOB)
        assert set(_search.space_of(rows, state, JOB).parameters) == {"compression"}

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"on": False}, "no setting is searched"),
            ({"picked": [7, 4]}, "Warm-up fraction: .* is not a range; choose an upper end above"),
            ({"picked": [4, 4]}, "Warm-up fraction: .* is not a range"),
        ],
    )
    def test_what_cannot_be_searched_is_said_in_one_sentence(self, change, said):
        rows = _search.rows_of(JOB, Space({"warmup": (0.0, 0.3)}))
        state = _search.first_state(rows)
        state["warmup"] |= change
        with pytest.raises(SpecError, match=said):
            _search.space_of(rows, state, JOB)


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        ss.Job(model="mlp", data="digits", strategy=ss.Zero3(), optimizer=ss.Optimizer("lamb", lr=3e-3), batch=128),
        ss.Job(
            model="mlp", data="digits", strategy="pipeline:gpipe", batch=ss.Batch(global_batch=64, micro_batch=16),
            lr_schedule=ss.LRSchedule("cosine", warmup_steps=5), seed=3,
        ),
        ss.Job(
            model="mlp", data="digits", compression=ss.Compression("topk", ratio=0.02), clip_norm=1.0,
            link=ss.Link(bandwidth="100 Mbit/s", latency="1 ms"), record=ss.Record(spans_first=0),
        ),
    ],
)  # fmt: skip
def test_the_code_of_a_job_makes_that_job(job):
    assert eval(job_code(job), {"ss": ss}) == job


@pytest.mark.parametrize(
    ("bandwidth", "latency", "code"),
    [
        ("1 Gbit/s", "1 ms", 'ss.Link(bandwidth="1 Gbit/s", latency="1 ms")'),
        ("100 Mbit/s", 0, 'ss.Link(bandwidth="100 Mbit/s", latency=0.0)'),
        ("25 GB/s", 2e-4, 'ss.Link(bandwidth="200 Gbit/s", latency="0.2 ms")'),
        (123456789.125, "5 us", 'ss.Link(bandwidth=123456789.125, latency="5 us")'),
    ],
)
def test_a_link_is_written_as_users_write_it_where_that_is_the_same_link(bandwidth, latency, code):
    link = ss.Link(bandwidth=bandwidth, latency=latency)
    assert f"link={code}," in job_code(JOB.replace(link=link))
    assert eval(code) == link


class TestChoosing:
    def test_constructing_starts_nothing_and_leaves_nothing(self, make_tuning_lab, runs_root):
        lab = make_tuning_lab(JOB, SPACE)
        assert (lab.name, lab.session, lab.is_running, lab.problem) == ("mlp-ring", None, False, "")
        assert not runs_root.exists()
        assert lab.definition().space == SPACE
        assert "2 hyperparameters of mlp on digits" in lab.screen.settings.summary
        assert not lab.screen.settings.is_open

    def test_what_is_impossible_is_said_before_anything_runs(self, make_tuning_lab):
        lab = make_tuning_lab(JOB, SPACE)
        with pytest.raises(TypeError, match=r"lab.choose\(2\) needs a mapping; .* lab.chosen = 2 to show"):
            lab.choose(2)
        lab.global_batch = 31
        assert lab.screen.start.disabled
        assert "batch.global_batch=31 is not divisible by world_size=2" in lab.screen.plan.value
        lab.global_batch = 64
        lab.objectives = ["seconds"]
        assert "contain no measure of quality" in lab.screen.plan.value
        lab.objectives = ["loss", "seconds"]
        lab.sampler = "cma-es"
        assert "minimises only one objective, got 2" in lab.screen.plan.value
        lab.sampler = "tpe"
        assert not lab.screen.start.disabled

    def test_what_the_controls_lack_stays_as_it_was_given(self, make_tuning_lab):
        link = ss.Link(bandwidth="1 Gbit/s", latency="15 ms")
        job = JOB.replace(lr_schedule=ss.LRSchedule("cosine", warmup_steps=2), clip_norm=1.0, link=link)
        lab = make_tuning_lab(job, SPACE)
        assert (lab.bandwidth, lab.latency) == ("1 Gbit/s", "15 ms")
        assert lab.job() == job
        lab.steps = 8
        assert lab.job() == job.replace(steps=8)

    def test_an_unknown_choice_is_an_error(self, make_tuning_lab):
        with pytest.raises(TypeError, match="no option 'trails'"):
            make_tuning_lab(JOB, trails=3)

    def test_every_control_has_a_description_and_a_tooltip(self, make_tuning_lab):
        lab = make_tuning_lab(JOB)
        for group in lab.controls.values():
            assert all(control.description and control.tooltip for control in group.values())
        assert all(button.tooltip for button in lab.screen.chosen.buttons.values())


@pytest.mark.slow
def test_a_study_is_run_shown_applied_moved_and_found_again(make_tuning_lab, monkeypatch):
    lab = make_tuning_lab(JOB, SPACE, name="seen", trials=3)
    lab.start()
    assert lab.is_running
    assert lab.wait(200)
    assert lab.problem == ""
    assert "has finished: 3 of 3 trials; 3 complete" in lab.status
    numbers = {n for trace in lab.screen.front.figure["data"] for n in trace.get("customdata", [])}
    assert numbers == {0, 1, 2}
    assert [row["number"] for row in lab.screen.table.rows] == [0, 1, 2]

    lab.screen.front.clicked = 1
    assert lab.chosen == 1
    assert "Trial 1" in lab.screen.chosen.head.value
    assert len(lab.screen.chosen.loss.figure["data"][0]["x"]) == JOB.steps
    job = lab.apply()
    assert lab.applied == job == lab.session.job(1)
    lab.pin()
    assert lab.session.record(1).pinned
    assert lab.open_run().id == lab.session.trial_run(1).id
    assert lab.pictures._view.live.overview.traces

    measured = [trial.values["seconds"] for trial in lab._trials]
    runs = len(list(lab.session.folder.glob("trials/*")))
    lab.is_relinked, lab.on_bandwidth, lab.on_latency = True, "10 Mbit/s", "10 ms"
    lab.refresh()
    moved = [trial.values["seconds"] for trial in lab.pictures._on_link]
    assert all(slow > quick for slow, quick in zip(moved, measured, strict=True))
    assert "seconds of training on 10 Mbit/s, 10 ms" in str(
        lab.screen.front.figure["layout"]["xaxis"]["title"]
    )
    assert len(list(lab.session.folder.glob("trials/*"))) == runs

    lab.screen.tabs.selected_index = 1
    assert "need 6 complete trials; so far there are 3" in lab.screen.fit_words.value
    monkeypatch.setattr(
        "shardscope_widgets.tuning_lab._engine._KNOWN", {}
    )  # as after a restart of the kernel
    again = make_tuning_lab(name="seen")
    assert again.job() == JOB
    assert again.definition().space == SPACE
    assert [row["number"] for row in again.screen.table.rows] == [0, 1, 2]
    again.screen.tabs.selected_index = 2
    assert again.screen.slices.figure["data"]
    assert "on the front" in again._summary.html
    zoomed = again.screen.front.figure["layout"]["uirevision"]
    again.name = "another"  # a study that does not exist yet shows nothing of the one before
    assert again._summary.html == ""
    assert [again.screen.table.rows, again.screen.slices.figure["data"], again.chosen] == [[], [], -1]
    assert again.screen.front.figure["layout"]["uirevision"] != zoomed
    again.name = "seen"
    assert "on the front" in again._summary.html
    other = make_tuning_lab(JOB.replace(steps=9), SPACE, name="seen")
    assert "the job differs in steps" in other.screen.plan.value
    with pytest.raises(StudyError, match="created with other arguments"):
        other.start()


def test_stop_answers_at_once_prune_counts_and_continue_goes_on(make_tuning_lab):
    lab = make_tuning_lab(JOB.replace(steps=30_000), SPACE, name="long", trials=2)
    lab.start()
    while not lab._engine.live():
        lab._engine.wait(0.05)
    lab.prune(0)
    while 0 in lab._engine.live():
        lab._engine.wait(0.05)
    lab.stop()
    assert lab.wait(120)
    records = lab.session.records()
    assert (records[0].state, records[0].reason) == ("pruned", "pruned by hand")
    assert {record.state for record in records[1:]} <= {"failed", "waiting"}
    assert lab.screen.start.description == "Continue"
    with pytest.raises(StudyError, match="trial 0 is not running in this kernel"):
        lab.prune(0)
    assert (
        sum(record.counted for record in StudySession.open(name="long").records() if record.state == "pruned")
        == 1
    )


@pytest.mark.slow
def test_a_click_on_prune_when_the_trial_has_just_ended_is_no_error(make_tuning_lab, monkeypatch):
    lab = make_tuning_lab(JOB, SPACE, name="late", trials=1)
    lab.start()
    assert lab.wait(120)
    lab.chosen = 0
    prune = lab.screen.chosen.buttons["prune"]
    with monkeypatch.context() as patch:  # it ends after the click, before the thread of the study gets to it
        patch.setattr(lab._engine, "can_prune", lambda _: True)
        patch.setattr(lab._engine, "ask", lambda act: act(lab.session))
        prune.click()
    prune.click()  # it has ended before the click, but the button is not disabled yet
    assert lab.problem == ""
    assert lab.session.records()[0].state == "complete"


@pytest.mark.slow
def test_a_study_that_baselines_have_joined_goes_on(make_tuning_lab):
    space = Space({"optimizer": ["lamb"], "optimizer[lamb].lr": (1e-3, 1e-1, "log")})
    lab = make_tuning_lab(JOB, space, name="joined", trials=2)
    lab.start()
    assert lab.wait(200)
    lab.trials = 3
    assert not lab.screen.start.disabled, lab.screen.plan.value
    lab.start()
    assert lab.wait(200)
    assert lab.problem == ""
    assert len([record for record in lab.session.records() if record.counted]) == 3
    again = make_tuning_lab(JOB, space, name="joined", trials=4)
    assert "created with other arguments" not in again.screen.plan.value
    assert named(again, "optimizer").picked == (named(again, "optimizer").options.index("lamb"),)
    marks = {row["number"]: row["mark"] for row in again.screen.table.rows}
    for record in again.session.records():
        assert (marks[record.number] == "baseline") == (record.params["optimizer"] != "lamb")
    assert set(marks.values()) == {"baseline"}  # they come first
    again.chosen = 0
    assert "baseline" in again.screen.chosen.head.value


def test_baselines_are_a_box_that_says_how_many_trials_they_take_and_can_be_unticked(make_tuning_lab):
    space = Space({"optimizer": ["lamb"], "optimizer[lamb].lr": (1e-3, 1e-1, "log")})
    lab = make_tuning_lab(JOB, space, name="boxed", trials=2)
    box = lab.screen.baselines
    assert [box.value, box.layout.display, box.disabled] == [True, None, False]
    assert (
        box.description == "Baselines: AdamW, Nesterov (3 trials)"
    )  # with the job as it is, which has AdamW
    assert lab.definition().drawn == ("lamb",)
    assert set(lab.definition().space.parameters["optimizer"].values) == {"lamb", "adamw", "nesterov"}
    box.value = False
    assert "(3 trials)" in box.description
    assert [lab.baselines, lab.definition().baselines, lab.definition().space] == [False, False, space]
    lab.search = lab.search | {
        "optimizer": {"on": False, "picked": []},
        "warmup": {"on": True, "picked": [0, 3]},
    }
    assert box.layout.display == "none"  # there is nothing to compare
    assert not make_tuning_lab(JOB, space, name="unboxed", baselines=False).screen.baselines.value


@pytest.mark.slow
def test_the_default_search_centres_its_batches_on_the_noise_scale_and_is_found_again(make_tuning_lab):
    job = JOB.replace(steps=40)
    lab = make_tuning_lab(job, trials=1, name="noise")
    lab.start()
    assert lab.wait(200)
    assert lab.problem == ""
    definition = lab.session.definition
    assert lab._engine.before.startswith("Measuring the gradient noise scale over")
    assert definition.batch_range.critical > 0
    assert definition.batches in lab.screen.settings.summary
    lab.trials = 2
    assert "or the same number of samples at another batch size" in lab.screen.settings.summary
    assert lab.definition().space == definition.space
    again = make_tuning_lab(job, name="noise")
    again._engine.session = None
    again._find(is_shown_as_begun=False, asked=("trials",))
    again.refresh()
    assert again.definition().space == definition.space
    assert definition.batches in again.screen.settings.summary


def test_what_is_measured_before_the_first_trial_is_the_status():
    assert status_text("first", [], 4, "running", before="Measuring.") == "Measuring."
    assert status_text("first", [], 4, "running") == "Study first: starting."


def test_a_study_says_before_it_starts_how_long_it_takes(make_tuning_lab):
    lab = make_tuning_lab(JOB.replace(steps=10_000), SPACE, trials=5, name="forecast", baselines=False)
    end = time.monotonic() + 60
    while "predicted for" not in lab.screen.settings.summary and time.monotonic() < end:
        lab._duration.wait(60)
        lab.refresh()
    assert lab._duration.seconds == preflight(lab.job()).run_time_s
    assert (
        f"in 5 trials: {about(5 * lab._duration.seconds)} of training, predicted for"
        in lab.screen.settings.summary
    )


def test_a_running_study_has_a_bar_and_the_time_left():
    ended = [TrialInfo(number, "complete", (), {}, (), steps=6, done=6) for number in range(2)]
    text = status_text("first", ended, 8, "running", left="3 min left")
    assert text.startswith("Study first is running: 2 of 8 trials, about 3 min left; 2 complete")
    pace = Pace(1)
    assert pace.left_text(1, 8) == ""
    pace._began -= 10
    assert pace.left_text(3, 8) == "25 s left"
    assert pace.left_text(8, 8) == ""


@pytest.mark.slow
def test_a_stop_while_the_noise_scale_is_measured_is_no_problem(make_tuning_lab):
    lab = make_tuning_lab(JOB.replace(steps=100_000), trials=1, name="early")
    lab.start()
    lab.stop()
    assert lab.wait(120)
    assert (lab.problem, lab.session) == ("", None)


def test_a_click_on_a_row_while_the_table_is_drawn_is_not_lost(make_tuning_lab):
    lab = make_tuning_lab(JOB, SPACE, name="clicked")
    click = threading.Thread(target=lambda: setattr(lab.screen.table, "chosen", 1))
    with lab._guard.lock:  # as the clock holds it
        click.start()
        while lab.screen.table.chosen != 1:
            time.sleep(0.001)
        lab.screen._drawn.clear()
        lab._draw()
    click.join(20)
    assert lab.chosen == 1
