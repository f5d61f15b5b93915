"""The Training Lab before a run: the predicted step instead of empty plots, and memory under ZeRO's stages."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope_widgets.training_lab._zero import alike_text, predicted_stages

STEP, LIVE = 0, 1


def predicted(lab):
    lab.screen.forecast.begin()
    lab.screen.forecast.wait(60)
    return lab.screen.forecast.zero


def names_of(zero):
    return [text.partition(" <br>")[0] for text in zero.figure.figure["layout"]["yaxis"]["ticktext"]]


def test_an_empty_lab_shows_the_predicted_step_and_the_first_run_its_curves(lab):
    predicted(lab)
    assert lab.screen.tabs.selected_index == STEP
    assert lab.screen.player.events["origin"] == "predicted"
    lab.start()
    assert lab.screen.tabs.selected_index == LIVE


def test_a_lab_with_runs_shows_their_curves(make_lab, lab):
    lab.start()
    assert make_lab().screen.tabs.selected_index == LIVE


def test_a_tab_that_a_person_chose_stays_open(lab):
    lab.screen.tabs.selected_index = 3
    lab.start()
    assert lab.screen.tabs.selected_index == 3


def test_memory_under_each_stage_is_shown_with_the_strategy_of_the_form_in_bold(lab):
    zero = predicted(lab)
    assert names_of(zero) == ["<b>ring</b>", "zero-1", "zero-2", "zero-3"]
    assert "zero-3 holds half of the model states of ring: " in zero.words.value
    lab.strategy, lab.world_size = "zero-3", 4
    lab.screen.forecast.wait(60)
    assert names_of(zero) == ["all-reduce", "zero-1", "zero-2", "<b>zero-3</b>"]
    assert "zero-3 holds a quarter of the model states of all-reduce: " in zero.words.value
    lab.global_batch = 7  # invalid
    assert zero.box.layout.display == "none"


@pytest.mark.parametrize("strategy", ["single", "pipeline"])
def test_a_job_that_no_stage_describes_shows_none(lab, strategy):
    lab.strategy = strategy
    assert predicted(lab).box.layout.display == "none"


def test_a_stage_that_cannot_be_predicted_is_left_out():
    found = ss.predict(ss.Job(model="mlp", data="digits", strategy="zero-1", world_size=2))

    def predict(job):
        return None if job.strategy.name == "zero-2" else ss.predict(job)

    stages = [each.job.strategy.name for each in predicted_stages(found, predict)]
    assert stages == ["all-reduce", "zero-1", "zero-3"]


def test_why_two_stages_hold_equal_states_is_said():
    found = ss.predict(ss.Job(model="mlp", data="digits", strategy="zero-1", world_size=2))
    stages = predicted_stages(found, ss.predict)
    assert "ZeRO 2 and 3 hold equal model states, because here both shard the parameters" in alike_text(
        stages
    )
    assert alike_text(stages[:-1]) == ""
