"""All panels as tabs of one job."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope_widgets import FaultLab, Lab, Planner, TrainingLab, TuningLab, Twin

JOB = ss.Job(model="gpt-nano", data="python-source", strategy="zero-3", world_size=2, steps=8)


@pytest.fixture
def lab(tmp_path):
    opened = Lab(JOB, root=tmp_path)
    yield opened
    opened.close()


def test_a_panel_is_created_when_its_tab_is_first_opened(lab):
    assert list(lab.panels) == ["Run"]
    assert isinstance(lab.panels["Run"], TrainingLab)
    lab.tab = "Tune"
    assert list(lab.panels) == ["Run", "Tune"]
    tune = lab.panels["Tune"]
    lab.tab = "Run"
    lab.tab = "Tune"
    assert lab.panels["Tune"] is tune


def test_each_tab_opens_its_panel_with_the_job(lab):
    for tab in ("Plan", "Predict", "Compare", "Tune", "Break"):
        lab.tab = tab
        assert lab.problem == ""
    panels = lab.panels
    assert isinstance(panels["Plan"], Planner)
    assert (panels["Plan"].model, panels["Plan"].global_batch) == ("gpt-nano", JOB.batch.global_batch)
    assert panels["Predict"].player.step_events.world_size == 2
    assert isinstance(panels["Compare"], Twin)
    assert panels["Tune"].job() == JOB
    assert isinstance(panels["Tune"], TuningLab)
    assert isinstance(panels["Break"], FaultLab)
    assert panels["Run"].job() == JOB == lab.job


def test_the_job_is_changed_in_one_place(lab):
    for tab in ("Plan", "Predict", "Tune"):
        lab.tab = tab
    lab.panels["Run"].world_size = 4
    assert lab.job == JOB.replace(world_size=4)
    assert "zero-3-gpt-nano on 4 ranks" in lab._title.value
    lab.tab = "Predict"  # follows
    assert lab.panels["Predict"].player.step_events.world_size == 4
    assert lab._offer.layout.display == "none"
    lab.tab = "Tune"  # has choices of its own
    assert lab._offer.layout.display is None
    assert "This tab shows zero-3-gpt-nano on 2 ranks" in lab._other.value
    assert lab.panels["Tune"].job() == JOB
    lab._take.click()
    assert lab.panels["Tune"].job() == lab.job
    assert lab._offer.layout.display == "none"


def test_an_invalid_form_leaves_the_job_as_it_was(lab):
    lab.panels["Run"].micro_batch = 7  # does not divide the batch
    assert lab.job == JOB


def test_compare_and_break_show_the_run_in_focus(tmp_path):
    run, other = (
        ss.launch(ss.Job(model="mlp", data="digits", steps=2, seed=seed), root=tmp_path).wait(60)
        for seed in (1, 2)
    )
    lab = Lab(run.job, root=tmp_path)
    lab.panels["Run"].focus = run.id
    for tab in ("Compare", "Break"):
        lab.tab = tab
        assert lab.panels[tab].run_id == run.id
    lab.panels["Run"].focus = other.id
    lab.tab = "Compare"
    assert lab.panels["Compare"].run_id == other.id
    lab.panels["Compare"].wait(30)
    lab.close()


def test_a_job_that_a_panel_cannot_show_says_why(tmp_path):
    lab = Lab(ss.Job(model="mlp", data="digits"), root=tmp_path, tab="Plan")
    assert "mlp is not a transformer" in lab.problem
    lab.tab = "Predict"
    assert lab.problem == ""
    assert lab.panels["Predict"].player.step_events is not None
    lab.close()


def test_the_picture_of_the_lab_is_that_of_the_open_tab(lab):
    lab.tab = "Predict"
    assert "data:image/svg+xml" in lab._still()
    assert "zero-3-gpt-nano" in lab._still()
    lab.tab = "Compare"
    assert "There are no runs yet" in lab._still()
