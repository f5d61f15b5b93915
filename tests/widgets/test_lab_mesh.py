"""The lab's tab Mesh: the ranks of the run in focus, or of the form's job."""

from __future__ import annotations

from shardscope.spec import Job, Layout
from widgets.fake_runs import fake_job


def test_the_mesh_tab_shows_the_run_in_focus_if_it_has_several_axes_else_the_job_of_the_form(lab, runtime):
    layout = Layout(data=2, tensor=2, global_batch=16, micro_batch=4)
    words = lab.screen.mesh.words
    assert "one axis of parallelism" in words.value
    job = Job(model="gpt-nano", data="python-source", layout=layout, steps=4)
    lab.watch(runtime.launch(job))
    assert "on 4 ranks: data 2 × tensor 2. Its first step is still running" in words.value
    lab.world_size = 3  # the form's job still has one axis
    assert "on 4 ranks: data 2 × tensor 2." in words.value
    lab.watch(runtime.launch(fake_job()))
    assert "one axis of parallelism" in words.value
