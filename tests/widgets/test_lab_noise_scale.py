"""The critical batch size in the Training Lab, beside the loss of a run that measures it."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope_widgets.figures import _noise_scale
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab.panels import Panels


def trained(*, noise_scale: bool, steps: int) -> ss.Run:
    choices = JobChoices(
        model="mlp", data="digits", strategy="all-reduce", steps=steps, noise_scale=noise_scale
    )
    run = ss.launch(choices.job())
    run.wait(60)
    return run


def test_a_run_that_measures_it_shows_what_the_run_itself_says() -> None:
    run = trained(noise_scale=True, steps=12)
    trace, panels = Trace.read(run), Panels()
    panels.draw(trace, [trace])
    assert panels.noise.box.layout.display is None
    told, info = run.noise_scale(), _noise_scale.noise_scale_info_of(trace)
    assert info is not None
    assert (info.steps, info.batch, info.critical[-1]) == (told.steps, 32, pytest.approx(told.latest))
    assert _noise_scale.noise_scale_text(info) in panels.noise.words.value


def test_other_runs_have_no_such_panel() -> None:
    trace, panels = Trace.read(trained(noise_scale=False, steps=2)), Panels()
    panels.draw(trace, [trace])
    assert panels.noise.box.layout.display == "none"


def test_where_it_cannot_be_measured_the_plan_says_so_before_anything_runs(make_lab) -> None:
    lab = make_lab(strategy="pipeline", noise_scale=True)
    assert "noise_scale=True cannot be combined with strategy=" in lab.screen.plan.value
    lab.strategy = "ring"
    assert "does not go" not in lab.screen.plan.value
