"""The row of the form with the number of ranks along each axis of a mesh."""

from __future__ import annotations

import pytest

from shardscope_widgets.job_form.axes import Axes
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.job_form.options import Options
from shardscope_widgets.words import AXIS_LABELS


@pytest.fixture
def choices():
    made = JobChoices(model="gpt-nano", data="python-source", world_size=4)
    made.strategy = "mesh"
    return made


@pytest.fixture
def row(choices):
    return Axes(choices, Options(choices, "strategy"))


def shown(row):
    return [child.description for child in row.children if hasattr(child, "description")]


def test_a_strategy_of_one_axis_has_no_row(choices, row):
    assert row.layout.display is None
    choices.strategy = "ring"
    assert (row.layout.display, list(row.children)) == ("none", [])


@pytest.mark.parametrize(
    ("model", "data", "beside"),
    [
        ("mlp", "digits", []), ("gpt-nano", "python-source", ["context"]),
        ("moe-nano", "python-source", ["context", "expert"]),
    ],
)  # fmt: skip
def test_the_context_and_expert_axes_are_offered_where_the_model_has_them(choices, row, model, data, beside):
    choices.data, choices.model = data, model
    offered = [axis for axis, label in AXIS_LABELS.items() if label in shown(row)]
    assert offered == ["data", "tensor", "pipeline", *beside]
    assert shown(row)[-1] == "Along the data axis"


def test_degrees_are_not_among_the_other_settings(choices):
    options = Options(choices, "strategy")
    assert not {*AXIS_LABELS.values()} & {box.children[0].description for box in options.children}


def test_an_axis_changes_the_number_of_ranks_and_keeps_the_other_axes(choices, row):
    row.controls["tensor"].value = 2
    assert (choices.world_size, choices.strategy_options) == (8, {"tensor": 2})
    row.controls["context"].value = 2
    row.controls["data"].value = 1
    assert choices.degrees == {"pipeline": 1, "data": 1, "context": 2, "tensor": 2}
    assert choices.world_size == choices.job().world_size == 4
    assert [row.controls[axis].value for axis in choices.degrees] == [1, 1, 2, 2]


def test_experts_are_distributed_over_the_data_ranks(choices, row):
    choices.model = "moe-nano"
    row.controls["expert"].value = 2
    assert (choices.world_size, choices.job().strategy.expert) == (4, 2)


def test_more_ranks_than_the_form_starts_are_refused_and_undone(choices, row):
    row.controls["tensor"].value = 64
    assert choices.degrees["tensor"] == row.controls["tensor"].value == 1
    assert "ranks, but the form starts at most" in row.children[-1].value
    row.controls["tensor"].value = 2
    assert shown(row)[-1] == "Along the data axis"
    assert len(row.children) == len(shown(row))
