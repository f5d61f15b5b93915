"""The Training Lab's first screen: presets, folded topics, what will happen, the explanation and its button."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import shardscope as ss
from conformance.runs import wait_for
from shardscope.measure.explain.changes import best_change
from shardscope.measure.explain.of_run import Explanation
from shardscope.runtime.preflight import Preflight, preflight
from shardscope_widgets.job_form.choices import AS_IT_IS, JobChoices
from shardscope_widgets.job_form.from_job import choices_of
from shardscope_widgets.job_form.topics import FIRST, OPTIONS, all_names, default_of, reset, topics
from shardscope_widgets.kit.form import names_in
from shardscope_widgets.training_lab._forecast_words import forecast_text
from shardscope_widgets.training_lab._presets import PRESETS
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
        batch = list(topics()).index("Batch")
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
        wanted = {name: preset.choices.get(name, default_of(name)) for name in all_names()}
        assert {name: getattr(lab, name) for name in all_names()} == wanted
        assert preset.look.replace("'", "&#x27;") in lab.screen.presets.words.value

    def test_the_tab_to_look_at_opens_and_a_change_of_the_form_unmarks_the_preset(self, lab):
        press(lab, "Watch a ring")
        assert lab.screen.tabs.titles[lab.screen.tabs.selected_index] == "One step"
        lab.steps = 10
        assert lab.screen.presets.words.value == ""
        assert {button.button_style for button in lab.screen.presets.buttons} == {""}

    @pytest.mark.usefixtures("two_known_cores")
    def test_the_pipeline_preset_has_a_bubble_that_more_micro_batches_reduce(self, lab):
        press(lab, "Break the pipeline's bubble")
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
        assert "available: it fits. " in text
        assert text.endswith("%.")

    def test_one_process_sends_nothing(self):
        text = forecast_text(preflight(ss.Job(model="mlp", data="digits", strategy="single")))
        assert "sends" not in text
        assert "The process holds up to " in text

    def test_a_job_that_cannot_be_predicted_is_said_to_be_so(self):
        assert "cannot be predicted" in forecast_text(Preflight(None))


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
        assert advised.screen.advice.button.disabled  # two runs at once would slow each other down
        advised.run.state = "completed"
        wait_for(lambda: not advised.screen.advice.button.disabled)

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
        wait_for(lambda: not panel.button.disabled)

    def test_the_button_fills_the_form_with_the_changed_job_and_starts_it(self, advised, runtime):
        advised.run.group = "my experiment"
        advised.screen.advice.button.click()
        assert advised.problem == ""
        assert advised.run.group == "my experiment"
        assert (advised.compression, advised.global_batch, advised.steps) == ("int8", 32, 60)
        assert runtime.known[-1].job.compression.name == "int8"
        assert advised.run is runtime.known[-1]
        assert advised.screen.advice.found is None  # the new run has not finished a step

    def test_the_run_that_it_starts_is_judged_against_the_one_before(self, advised, runtime, monkeypatch):
        told = lambda run, before: f"{run.id} beside {before.id}: it helped."
        monkeypatch.setattr("shardscope.measure.explain.verdict.verdict", told)
        advised.screen.advice.button.click()
        run = advised.run
        assert run.baseline == "mine"  # it is on disk, so that a lab that opens later finds it
        for step in range(1, 8):
            run.write(step_events("ring", 2, step))
        told = f"<b>So far: {run.id} beside mine: it helped.</b><br>Communication takes 60%."
        wait_for(lambda: told in advised.screen.advice.line.value)


def test_filling_the_form_names_the_settings_that_have_no_control(lab):
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=9)
    lab.fill(job)
    assert lab.problem == ""
    lab.fill(job.replace(clip_norm=0.5))
    assert "Start would leave them out: clip norm (0.5)" in lab.problem
