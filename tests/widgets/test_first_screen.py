"""The Training Lab's first screen: presets, folded topics, what will happen, the explanation and its button."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from torch import nn

import shardscope as ss
from conformance.runs import wait_for
from shardscope.analytic.terms import Term
from shardscope.errors import SpecError
from shardscope.measure.explain.changes import best_change
from shardscope.measure.explain.of_run import Explanation
from shardscope.measure.explain.verdict import Verdict
from shardscope.runtime.launcher.preflight import Preflight, preflight
from shardscope_widgets.job_form.choices import AS_IT_IS, JobChoices
from shardscope_widgets.job_form.from_job import choices_of
from shardscope_widgets.job_form.topics import FIRST, OPTIONS, all_names, default_of, reset, topics
from shardscope_widgets.kit.form import names_in
from shardscope_widgets.training_lab._forecast import Forecast
from shardscope_widgets.training_lab._forecast_words import dominant_text, forecast_text
from shardscope_widgets.training_lab._presets import PRESETS, preset_named
from widgets.fake_runs import fake_run, step_events


def press(lab, title):
    next(button for button in lab.screen.presets.buttons if button.description == title).click()


class TestTopics:
    def test_every_control_is_on_the_first_screen_or_in_one_topic(self):
        folded = [name for names in topics().values() for name in names]
        assert sorted([*FIRST, *folded]) == sorted([*names_in(JobChoices), *OPTIONS])

    def test_only_model_strategy_ranks_and_buttons_are_in_view(self, lab):
        assert lab.screen.topics.selected_index is None
        assert FIRST == ("model", "strategy", "world_size")

    def test_a_folded_topic_names_what_was_changed(self, lab):
        batch = 1 + list(topics()).index("Batch")  # the place comes first
        assert lab.screen.topics.titles[batch] == "Batch"
        lab.global_batch = 64
        assert lab.screen.topics.titles[batch] == "Batch: global batch 64"
        lab.compression, lab.compression_options = "topk", {"ratio": 0.05}
        assert "Link and compression: topk, ratio 0.05" in lab.screen.topics.titles

    def test_every_control_has_a_line_of_help_below_it(self, lab):
        for box in lab.screen.topics.children:
            for each in box.children:
                if each not in lab.screen.options.values():
                    control, about = each.children
                    assert control.tooltip.split("“")[0].split("'")[0] in about.value


class TestPresets:
    @pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.title)
    def test_each_sets_the_whole_form_to_a_job_that_can_start(self, lab, preset):
        lab.model, lab.seed, lab.bandwidth, lab.precision = "cnn", 7, "1 Gbit/s", "bf16-mixed"
        press(lab, preset.title)
        assert not lab.screen.start.disabled
        choices = {**preset.choices, **preset.here}  # clusters cannot be emulated
        wanted = {name: choices.get(name, default_of(name)) for name in all_names()}
        assert {name: getattr(lab, name) for name in all_names()} == wanted
        assert preset.look.replace("'", "&#x27;") in lab.screen.presets.words.value

    def test_a_lab_can_open_with_one_of_them_and_with_changes_of_it(self, make_lab):
        lab, plain = make_lab(preset="break the bubble", steps=7), JobChoices()
        preset = preset_named("Break the bubble")
        reset(plain, {**preset.choices, **preset.here, "steps": 7})
        assert lab.job() == plain.job()
        assert "stages wait for each other" in lab.screen.presets.words.value
        assert not lab.screen.start.disabled
        with pytest.raises(SpecError, match="did you mean 'Break the bubble'"):
            make_lab(preset="Break a bubble")

    def test_one_press_plays_the_predicted_step_and_starts_the_job_where_times_agree(self, lab, monkeypatch):
        monkeypatch.setattr("shardscope.runtime.emulated.why_not_emulated", lambda: "")
        lab.screen.forecast.begin()
        lab.screen.tabs.selected_index = 2
        press(lab, "Watch a ring")
        lab.screen.forecast.wait(60)
        lab.refresh()
        player = lab.screen.player
        assert lab.screen.tabs.selected_index == 0
        assert (player.events["origin"], player.measured, player.playing) == ("predicted", {}, True)
        assert (lab.run.job, lab.is_running, lab.screen.follow.value) == (
            lab.job().replace(device="cpu"),
            True,
            True,
        )
        assert lab.run.cluster == ss.Cluster.emulated(4, "50 Mbit/s", flops="1 GFLOP/s")
        assert "4 real ranks on 4 emulated nodes, 50 Mbit/s, 1 GFLOP/s" in player.note
        for step in (1, 2, 3):
            lab.run.write(step_events("ring", 4, step))
        lab.refresh()
        assert (player.events["origin"], player.measured["origin"]) == ("predicted", "measured")

    def test_the_ranks_follow_a_change_of_the_form_until_they_are_stopped(self, lab, monkeypatch):
        monkeypatch.setattr("shardscope_widgets.training_lab._stage.FOLLOW_AFTER_S", 0.0)
        press(lab, "Watch a ring")
        first = lab.run
        lab.strategy = "tree"
        wait_for(lambda: lab.run is not first)
        assert (lab.run.job.strategy.name, lab.shown) == ("tree", [lab.run.id])
        assert lab.screen.follow.value
        lab.stop()
        lab.strategy = "ring"
        lab.refresh()
        assert lab.run.job.strategy.name == "tree"

    def test_a_second_press_starts_its_job_once_and_an_invalid_form_leaves_the_ranks_alone(
        self, lab, monkeypatch
    ):
        monkeypatch.setattr("shardscope_widgets.training_lab._stage.FOLLOW_AFTER_S", 0.0)
        press(lab, "Make the network slow")
        press(lab, "Compress on the slow network")
        second, shown = lab.run, lab.shown
        lab.refresh()
        assert (lab.run, lab.shown, len(shown)) == (second, shown, 2)
        lab.strategy = "tree"
        lab.global_batch = 7  # four ranks cannot share it equally
        lab.refresh()
        assert lab.run is second

    def test_a_press_ticks_its_own_run_and_the_one_to_compare_it_with(self, lab):
        for title in ("Watch a ring", "Make the network slow", "Compress on the slow network"):
            press(lab, title)
        assert lab.shown == [run.id for run in reversed(lab.runs)][1:]

    def test_a_lab_that_opens_with_a_preset_shows_no_earlier_run(self, make_lab, runtime):
        runtime.known = [fake_run("ring", 2, steps=3)]
        assert make_lab(preset="Watch a ring").shown == []

    def test_a_run_keeps_its_name_and_its_colour_when_others_arrive(self, lab):
        first = lab._book.entries[lab.start().id].trace
        before = first.label, first.look
        lab.world_size = 4
        second = lab._book.entries[lab.start().id].trace
        lab.shown = [run.id for run in lab.runs]
        lab.refresh()
        assert (first.label, first.look) == before
        assert (second.label, second.look != first.look) == ("4 ranks", True)

    def test_a_change_of_the_form_unmarks_the_preset(self, lab):
        press(lab, "Watch a ring")
        lab.steps = 10
        assert lab.screen.presets.words.value == ""
        assert {button.button_style for button in lab.screen.presets.buttons} == {""}

    @pytest.mark.usefixtures("two_known_cores")
    def test_the_pipeline_preset_has_a_bubble_that_more_micro_batches_reduce(self, lab):
        press(lab, "Break the bubble")
        job = lab.job()
        more = best_change("pipeline bubble", job, lambda job: preflight(job).prediction, cores=2).job
        bubble, less = (preflight(each).prediction.time["pipeline bubble"].value for each in (job, more))
        assert more.num_micro_batches > job.num_micro_batches
        assert more.batch.global_batch == job.batch.global_batch
        assert less < 0.6 * bubble


class TestFromJob:
    @pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.title)
    def test_a_form_filled_from_a_job_describes_the_same_job(self, preset):
        first, second = JobChoices(), JobChoices()
        reset(first, preset.choices)
        reset(second, choices_of(first.job()))
        assert second.job() == first.job()

    def test_the_machines_own_link_stays_so(self):
        assert choices_of(JobChoices().job())["bandwidth"] == AS_IT_IS


class TestWhatWillHappen:
    def test_it_says_time_bytes_memory_and_what_dominates(self):
        found = preflight(ss.Job(model="mlp", data="digits", strategy="ring", world_size=4, steps=50))
        text = forecast_text(found)
        assert " for 50 steps, once the ranks have started. Each rank sends 260 kB per step" in text
        assert "of memory available on this machine. " in text
        assert text.endswith("%.")

    def test_one_process_sends_nothing(self):
        text = forecast_text(preflight(ss.Job(model="mlp", data="digits", strategy="single")))
        assert "sends" not in text
        assert "The process needs " in text

    def test_waiting_in_a_pipeline_is_named_and_not_called_the_bubble_which_is_a_mean_over_ranks(self):
        idle = Term.total("idle", (Term("pipeline bubble", 4.0, "s"), Term("fixed cost", 0.0, "s")))
        told = lambda seconds: dominant_text(Term.total("step", (Term("forward", seconds, "s"), idle)))
        longest = ", on the rank that computes longest."
        assert told(5.0).endswith(f"most of the step time: 56%, and waiting for other stages 44%{longest}")
        assert told(3.0) == f"Waiting for other stages takes most of the step time: 57%{longest}"
        assert told(16.0) == "Computation takes most of the step time: 80%."

    def test_a_job_that_cannot_be_predicted_is_said_to_be_so(self):
        told = forecast_text(Preflight(None, problem="KeyError: 3"))
        assert told == "This job cannot be predicted: KeyError: 3"

    def test_functions_of_ones_own_are_called_once_the_button_allows_it(self):
        called = []

        def make_model():
            called.append(True)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        forecast = Forecast(lambda: None)
        forecast.want(ss.Job(model=make_model, data="digits", strategy="ring"))
        forecast.begin()
        forecast.wait(60)
        assert "functions of your own" in forecast.line.value
        assert (forecast.call.layout.display, called) == (None, [])
        forecast.call.click()
        forecast.wait(60)
        assert called
        assert "Each rank sends 2.6 kB per step" in forecast.line.value
        assert forecast.call.layout.display == "none"
        forecast.want(ss.Job(model=make_model, data="digits", strategy="ring", steps=7))
        forecast.wait(60)
        assert "for 7 steps" in forecast.line.value
        assert forecast.call.layout.display == "none"

    def test_a_function_that_the_button_has_not_allowed_is_not_called(self):
        called = []

        def make_other_model():
            called.append(True)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        forecast = Forecast(lambda: None)
        forecast.want(
            ss.Job(
                model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data="digits", strategy="ring"
            )
        )
        forecast.begin()
        forecast.wait(60)
        forecast.call.click()
        forecast.wait(60)
        assert forecast.call.layout.display == "none"
        forecast.want(ss.Job(model=make_other_model, data="digits", strategy="ring"))
        forecast.wait(60)
        assert (forecast.call.layout.display, called) == (None, [])


class TestAdvice:
    @pytest.fixture
    def advised(self, lab, runtime, monkeypatch):
        job = ss.Job(model="gpt-nano", data="python-source", world_size=2, batch=32, steps=60)
        run = replace(fake_run("ring", 2, steps=8), job=job, id="mine", title="mine", state="running")
        found = Explanation("Communication takes 60%.", "communication", 0.6, {"compression": "int8"}, 2.0)
        monkeypatch.setattr("shardscope.measure.explain.of_run.explain_events", lambda _run, _events: found)
        lab.screen.advice.begin()
        runtime.known.append(run)
        lab.watch(run)
        lab.screen.advice.wait(60)
        return lab

    def test_the_run_in_focus_is_explained_while_it_runs(self, advised):
        assert "Communication takes 60%." in advised.screen.advice.line.value
        assert advised.screen.advice.button.layout.display is None
        assert advised.screen.advice.button.description == "Run it"

    @pytest.mark.parametrize("end", ["completed", "stopped"])
    def test_a_change_chosen_during_a_run_starts_when_it_has_ended(self, advised, runtime, end):
        button = advised.screen.advice.button
        advised.fill(advised.run.job)
        button.click()
        assert button.description == "Will run when this run ends or is stopped"
        advised.refresh()
        assert len(runtime.known) == 1  # two runs at a time would slow each other down
        if end == "stopped":
            advised.screen.stop.click()
        else:
            advised.run.state = end
        wait_for(lambda: (runtime.known[0].state, advised.refresh()) == (end, None))
        assert [run.state for run in runtime.known] == [end, "running"]
        assert (advised.run.baseline, advised.compression) == ("mine", "int8")
        advised.refresh()
        assert len(runtime.known) == 2
        assert button.description == "Run it"

    def test_pressing_again_cancels_it(self, advised, runtime):
        button = advised.screen.advice.button
        button.click()
        button.click()
        assert button.description == "Run it"
        advised.run.state = "completed"
        advised.refresh()
        assert len(runtime.known) == 1

    def test_a_second_change_has_its_own_button_and_replaces_the_first_while_that_waits(
        self, advised, runtime, monkeypatch
    ):
        second = {"batch": advised.run.job.batch.replace(shares="measured")}
        monkeypatch.setattr("shardscope.measure.explain.of_run.second_remedy", lambda *_: ("Shares.", second))
        panel = advised.screen.advice
        assert panel.rows[1].layout.display == "none"
        advised.run.write(step_events("ring", 2, 9))
        panel._due_at = 0.0
        advised.refresh()
        panel.wait(60)
        assert (panel.rows[1].layout.display, "Shares." in panel.second_line.value) == (None, True)
        panel.button.click()
        panel.second_button.click()
        assert panel.button.description == "Run it"
        assert panel.second_button.description == "Will run when this run ends or is stopped"
        advised.run.state = "completed"
        advised.refresh()
        assert (len(runtime.known), runtime.known[-1].job.batch.shares) == (2, "measured")

    @pytest.mark.parametrize(("state", "told"), [("stopped", "was stopped"), ("failed", "has failed")])
    def test_a_run_that_does_not_complete_cancels_it_and_says_so(self, advised, runtime, state, told):
        advised.screen.advice.button.click()
        advised.run.state = state
        advised.refresh()
        advised.refresh()
        assert len(runtime.known) == 1
        assert f"The change was not run, because ring-gpt-nano {told}." in advised.screen.advice.line.value
        advised.screen.advice.button.click()  # now it is wanted although the run did not complete
        assert len(runtime.known) == 2
        assert "was not run" not in advised.screen.advice.line.value

    def test_it_waits_for_every_other_run_too(self, advised, runtime):
        other = replace(advised.run, id="other", title="other")
        runtime.known.append(other)
        advised.screen.advice.button.click()
        advised.run.state = "completed"
        advised.refresh()
        assert len(runtime.known) == 2
        assert advised.screen.advice.button.description == "Will run when no run is in progress"
        other.state = "stopped"
        advised.refresh()
        assert runtime.known[-1].baseline == "mine"

    def test_a_form_that_was_changed_during_the_wait_stays_as_it_is(self, advised, runtime):
        advised.fill(advised.run.job)
        advised.screen.advice.button.click()
        advised.seed = 99
        advised.run.state = "completed"
        advised.refresh()
        assert runtime.known[-1].job.compression.name == "int8"
        assert (advised.seed, advised.compression) == (99, "none")

    def test_a_run_that_ends_while_it_is_explained_is_explained_again(self, advised, monkeypatch):
        panel, found, may_go = advised.screen.advice, advised.screen.advice.found, threading.Event()
        slow = lambda _run, _events: (may_go.wait(60), found)[1]
        monkeypatch.setattr("shardscope.measure.explain.of_run.explain_events", slow)
        advised.run.write(step_events("ring", 2, 9))
        panel._due_at = 0.0
        advised.refresh()
        advised.run.state = "completed"
        advised.refresh()
        may_go.set()
        panel.wait(60)
        wait_for(lambda: panel._known == (9, False))

    def test_advice_changes_only_once_another_cause_was_found_twice(self, advised, monkeypatch):
        panel, other = advised.screen.advice, Explanation("Ranks wait 40%.", "straggler", 0.4, None, None)
        monkeypatch.setattr("shardscope.measure.explain.of_run.explain_events", lambda _run, _events: other)
        for step, told in ((9, "Communication takes 60%."), (10, "Ranks wait 40%.")):
            advised.run.write(step_events("ring", 2, step))
            panel._due_at = 0.0
            advised.refresh()
            panel.wait(60)
            assert told in panel.line.value

    def test_it_says_which_run_it_explains_once_the_form_shows_another_job(self, advised, runtime):
        advised.fill(advised.run.job)
        advised.refresh()
        assert "ring-gpt-nano: " not in advised.screen.advice.line.value
        advised.seed = 99
        advised.refresh()
        assert "</svg>ring-gpt-nano: Communication takes 60%." in advised.screen.advice.line.value
        advised.fill(advised.run.job)
        runtime.known.insert(0, fake_run("all-reduce", 2, steps=3, run_id="other"))
        advised.refresh()
        advised.shown = ["other", "mine"]
        assert f"{runtime.known[-1].id} " not in advised.screen.advice.line.value
        assert ": Communication takes 60%." in advised.screen.advice.line.value

    def test_until_a_run_is_explained_a_line_keeps_the_place_of_the_text_before(self, advised):
        panel = advised.screen.advice
        advised.run.state = "completed"
        advised.refresh()
        panel.wait(10)
        panel._told = panel._told._replace(found=replace(panel.found, change={"seed": 7}))
        panel.try_it()
        assert " has started. Where its step time goes is shown here after 6 steps.</div>" in panel.line.value
        kept = panel.line.value.partition('<div class="ss-kept" aria-hidden="true">')[2]
        assert "Communication takes 60%." in kept
        assert panel.box.layout.display is None
        assert (panel.button.layout.display, panel.button.layout.visibility) == (None, "hidden")
        advised.run.state = "failed"  # it will not be explained
        advised.refresh()
        assert panel.box.layout.display == "none"

    def test_the_button_fills_the_form_with_the_changed_job_and_starts_it(self, advised, runtime):
        advised.run.group, advised.run.state = "my experiment", "completed"
        advised.refresh()
        advised.screen.advice.button.click()
        assert advised.problem == ""
        assert advised.run.group == "my experiment"
        assert (advised.compression, advised.global_batch, advised.steps) == ("int8", 32, 60)
        assert runtime.known[-1].job.compression.name == "int8"
        assert advised.run is runtime.known[-1]
        assert advised.screen.advice.found is None  # the new run has not finished a step

    @pytest.mark.parametrize(("title", "is_kept"), [("Break the bubble", True), ("Watch a ring", False)])
    def test_the_hint_of_a_preset_stays_while_its_own_job_is_changed(self, advised, runtime, title, is_kept):
        mine = advised.run
        press(advised, "Break the bubble")
        mine.job = advised.job()
        press(advised, title)
        advised.shown = [advised.focus, mine.id]
        advised.focus = mine.id
        panel = advised.screen.advice
        for run in runtime.known:
            run.state = "completed"
        advised.refresh()
        panel.wait(10)
        panel._told = panel._told._replace(found=replace(panel.found, change={"seed": 7}))
        panel.try_it()
        assert (advised.problem, advised.seed) == ("", 7)
        assert ("micro-batches" in advised.screen.presets.words.value) is is_kept
        assert [each.button_style for each in advised.screen.presets.buttons].count("info") == is_kept
        advised.steps += 1  # this change is not the lab's
        assert advised.screen.presets.words.value == ""

    def test_the_run_that_it_starts_is_judged_against_the_one_before(self, advised, runtime, monkeypatch):
        told = lambda run, before: Verdict("Ranks wait less.", f"{run.id} beside {before.id}: faster.")
        monkeypatch.setattr("shardscope.measure.explain.verdict.verdict", told)
        advised.run.state = "completed"
        advised.refresh()
        advised.screen.advice.button.click()
        run = advised.run
        assert run.baseline == "mine"  # it is on disk, so that a lab that opens later finds it
        for step in range(1, 8):
            run.write(step_events("ring", 2, step))
        for _ in range(100):
            if "Communication" in (line := advised.screen.advice.line.value).partition("ss-kept")[0]:
                break
            threading.Event().wait(0.05)
        folded = f"<details><summary>{run.id} beside mine: faster.</summary>{run.id} beside mine: faster.</details>"
        told = f"<b>So far: Ranks wait less.</b>{folded}</div><div>Communication takes 60%."
        assert told in line


def test_filling_the_form_names_the_settings_that_have_no_control(lab):
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=9)
    lab.fill(job)
    assert lab.problem == ""
    lab.fill(job.replace(clip_norm=0.5))
    assert "so Start leaves them out: clip norm (0.5)" in lab.problem
