"""All panels as tabs of one job."""

from __future__ import annotations

import threading

import pytest
import torch

import shardscope as ss
from shardscope_widgets import FaultLab, Lab, Planner, TrainingLab, TuningLab, Twin

CALLS: list[str] = []
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


def test_predict_follows_the_emulated_cluster(lab):
    lab.tab = "Predict"
    cluster = ss.Cluster.emulated(2, "1 Mbit/s", "1 ms")
    lab.panels["Run"].fill(JOB, cluster)
    lab.tab = "Run"
    lab.tab = "Predict"
    assert lab.panels["Predict"].children[0].value == ss.predict(JOB, cluster)._repr_html_()
    lab.tab = "Tune"
    assert lab._offer.layout.display == "none"  # it has this job
    choices = lab.panels["Run"].place.choices
    choices.node_bandwidth = "fast"
    lab.panels["Run"].world_size = 4
    assert lab.job == JOB
    choices.node_bandwidth = "1 Mbit/s"
    assert "on 4 ranks" in lab._title.value


def own_model():
    CALLS.append("own_model")
    return torch.nn.Linear(64, 10)


def test_predict_calls_no_function_of_the_user_and_shows_no_former_prediction(lab):
    lab.tab = "Predict"
    lab.panels["Run"].fill(ss.Job(model=own_model, data="digits", world_size=2, steps=8))
    lab.tab = "Run"
    lab.tab = "Predict"
    assert "functions of your own, which this tab does not call; press Predict it under Run" in lab.problem
    assert CALLS == []
    assert "Predict" not in lab.panels
    assert "<svg" not in lab._still()
    assert lab._tabs.children[lab._tabs.selected_index].children == ()


def test_one_press_allows_a_run_of_own_functions_to_be_compared_and_its_job_to_be_predicted(tmp_path):
    def own():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    job = ss.Job(model=own, data="digits", steps=2, batch=16)
    run = ss.launch(job, root=tmp_path).wait(60)
    lab = Lab(job, root=tmp_path)
    lab.panels["Run"].watch(run)
    lab.tab = "Compare"
    compare = lab.panels["Compare"]
    assert compare.screen.call.layout.display is None
    assert (
        "functions of your own (own), which are called in this kernel once you press"
        in compare.screen.status.value
    )
    assert compare.comparison is None
    compare.screen.call.click()
    compare.wait(60)
    assert compare.problem == ""
    assert compare.comparison is not None
    assert compare.screen.call.layout.display == "none"
    lab.tab = "Predict"
    assert lab.problem == ""
    lab.close()
    alone = Twin(root=tmp_path)  # which reads the run from disk, where functions are names
    assert alone.screen.call.layout.display is None
    alone.screen.call.click()
    alone.wait(60)
    assert alone.comparison is not None
    alone.close()


def test_a_plan_is_trained_without_the_lock_that_a_picture_of_the_lab_waits_for(tmp_path, runtime):
    lab = Lab(JOB, root=tmp_path, tab="Plan")
    planner, held = lab.panels["Plan"], threading.Event()
    planner.fix = {"data": 2, "tensor": 2, "pipeline": 2}

    def picture() -> None:
        with lab._guard.lock:
            held.set()
            lab._kept()  # which takes the planner's lock

    def begun(_found, _run):
        drawing = threading.Thread(target=picture)
        drawing.start()
        drawing.join(20)
        assert not drawing.is_alive()

    planner.on_train = begun
    planner.screen.train.click()
    assert held.is_set()
    assert planner.problem == ""
    lab.close()


def test_the_form_has_the_slowed_cluster_of_a_plan_that_is_trained_small(tmp_path, runtime):
    lab = Lab(JOB, root=tmp_path, tab="Plan")
    planner = lab.panels["Plan"]
    planner.fix = {"data": 2, "pipeline": 1, "tensor": 2}
    found = planner.plans.rehearsal(1, world_size=4, step_s=8.0, steps=3)
    run = runtime.launch(found.job, found.cluster)
    lab._train(found, run)
    panel = lab.panels["Run"]
    assert (lab.tab, panel.problem, panel.place.choices.cluster()) == ("Run", "", found.cluster)
    assert panel._describes(run.job, run.cluster)
    lab.tab = "Predict"
    assert found.cluster.name in lab.panels["Predict"].children[0].value
    lab.close()


def test_an_invalid_form_leaves_the_job_as_it_was(lab):
    lab.panels["Run"].micro_batch = 7  # does not divide the batch
    assert lab.job == JOB


def test_compare_and_break_show_the_run_in_focus(tmp_path):
    run, other = (
        ss.launch(ss.Job(model="mlp", data="digits", steps=2, seed=seed), root=tmp_path).wait(60)
        for seed in (1, 2)
    )
    lab = Lab(run.job, root=tmp_path)
    assert lab.panels["Run"].shown == []  # the job is shown, not an earlier run
    lab.panels["Run"].refresh()
    assert lab.panels["Run"].run is None
    newest = Lab(root=tmp_path)
    assert newest.panels["Run"].focus == other.id
    newest.close()
    lab.panels["Run"].watch(run)
    for tab in ("Compare", "Break"):
        lab.tab = tab
        assert lab.panels[tab].run_id == run.id
    lab.panels["Run"].watch(other)
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


def test_the_picture_follows_a_panel_that_takes_the_job(lab):
    lab.tab = "Tune"
    lab._begin_showing()
    lab.panels["Run"].world_size = 4
    lab._take.click()
    assert lab._is_behind  # the picture still shows the former panel
    lab._publish()
    lab.panels["Tune"].screen.status.value = "changed"
    assert lab._is_behind


def test_the_picture_is_drawn_under_the_lock_of_the_open_panel(lab):
    panel = lab.panels["Run"]
    panel._kept = lambda: [str(panel._guard.lock._is_owned())]
    assert lab._still().endswith("True")
