"""The picture of a mesh: parts of layers, bytes and times by axis, and the links between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardscope as ss
from shardscope.runlog.axes import axis_of
from shardscope.runlog.spans import covered
from shardscope_widgets import figures
from shardscope_widgets.figures._rank_mesh import draw_rank_mesh, grid_places, rank_mesh_text

LAYOUT = {"global_batch": 16, "micro_batch": 4}


@pytest.fixture(scope="module")
def prediction():
    return ss.predict(
        ss.Job(
            model="gpt-nano",
            data="python-source",
            layout=ss.Layout(data=2, tensor=2, zero=1, **LAYOUT),
            steps=4,
        )
    )


@pytest.fixture(scope="module")
def info(prediction):
    return figures.info(figures.rank_mesh, prediction)


def test_tensor_ranks_hold_all_of_a_layer_together_and_copies_of_what_is_not_divided(info, prediction):
    first, second = info.layers[0], info.layers[1]
    assert first == info.layers[2]  # another replica
    for one, other in zip(first, second, strict=True):
        assert (min(one.start, other.start), max(one.end, other.end)) == (0.0, 1.0)
    whole = sum(layer.num_params * (layer.end - layer.start) for layer in first)
    assert round(4 * whole) == prediction.kinds["parameters"][0]


def test_bytes_and_times_of_the_axes_sum_to_those_of_the_prediction(info, prediction):
    assert [sum(sent) for sent in zip(*info.sent.values(), strict=True)] == prediction.sent_bytes.tolist()
    (communication,) = (part for part in prediction.time.parts if part.name == "communication")
    assert sum(info.seconds.values()) == pytest.approx(communication.value)


def test_the_most_expensive_axis_is_named_first(info):
    first, second = sorted(info.used, key=lambda axis: -info.seconds[axis])
    text = rank_mesh_text(info)
    assert text.index(f"along the {first} axis") < text.index(f"along the {second} axis")
    assert f"Communication along the {first} axis takes longest." in text


def test_ranks_of_an_expert_axis_hold_different_experts():
    layout = ss.Layout(data=4, expert=2, **LAYOUT)
    prediction = ss.predict(ss.Job(model="moe-nano", data="python-source", layout=layout))
    found = figures.info(figures.rank_mesh, prediction)
    assert found.layers[0] == found.layers[2] != found.layers[1]
    whole = sum(layer.num_params * (layer.end - layer.start) for layer in found.layers[0])
    assert round(4 * whole) == prediction.kinds["parameters"][0]
    assert "along the expert axis" in rank_mesh_text(found)
    assert draw_rank_mesh(found).data


def test_a_recorded_step_replaces_bytes_and_times(info, prediction):
    step = ss.simulate.step_events(prediction.job)
    measured = info.measured(step)
    assert measured.sent == info.sent  # a predicted step sends what the formulas say
    assert measured.layers == info.layers
    assert set(measured.seconds) == {axis_of(event.kind) for event in step.events} - {None}
    told = rank_mesh_text(info, measured)
    assert (told.count("predicted step"), told.count("measured step"), told.count("takes longest")) == (
        1,
        1,
        1,
    )


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("interleaved", 2)])
def test_messages_between_stages_cost_no_time_while_passes_run(schedule, stages):
    layout = ss.Layout(
        data=2, pipeline=2, schedule=schedule, virtual_stages=stages, global_batch=32, micro_batch=2
    )
    prediction = ss.predict(ss.Job(model="gpt-nano", data="python-source", layout=layout))
    step = ss.simulate.step_events(prediction.job)
    passes = [(e.rank, e.start_s, e.end_s) for e in step.events if e.lane == "compute"]
    early = [
        e._replace(start_s=max(0.0, e.start_s - 0.5 * step.step_time_s), lane="communication")
        for e in step.events
        if axis_of(e.kind) == "pipeline"
    ]  # receives that are posted long before they are needed
    shown = figures.info(figures.rank_mesh, prediction).measured(replace(step, events=(*step.events, *early)))
    computing = sum(covered((a, b) for rank, a, b in passes if rank == each) for each in range(4)) / 4
    assert 0 < shown.seconds["pipeline"] <= step.step_time_s - computing + 1e-9


def test_stages_of_a_pipeline_hold_different_layers_and_all_of_them_together():
    job = ss.Job(
        model="gpt-nano",
        data="python-source",
        layout=ss.Layout(data=2, tensor=2, pipeline=2, **LAYOUT),
        steps=4,
    )
    found = figures.info(figures.rank_mesh, ss.predict(job))
    for layer in zip(*found.layers, strict=True):
        assert sum(part.end - part.start for part in layer) == pytest.approx(2)  # one for each replica
    assert found.layers[0] != found.layers[4]


@pytest.mark.parametrize(
    ("axes", "columns", "rows"),
    [
        ((("data", 2), ("tensor", 2)), 2, 2),
        ((("data", 2), ("tensor", 4)), 4, 2),
        ((("pipeline", 1), ("data", 4), ("tensor", 2)), 4, 2),
        ((("pipeline", 2), ("data", 2), ("tensor", 2)), 4, 2),
        ((("data", 1), ("tensor", 8)), 8, 1),
    ],
)
def test_every_rank_has_a_place_of_its_own_beside_the_next_rank_of_the_innermost_axis(axes, columns, rows):
    found = grid_places(axes)
    assert found[:2] == (columns, rows)
    assert len(set(found[2])) == columns * rows
    (x0, y0), (x1, y1) = found[2][:2]
    assert abs(x1 - x0) + abs(y1 - y0) == 1


def test_links_connect_ranks_that_differ_on_one_axis_only(info):
    drawn = {
        trace.name.split(":")[0]: trace for trace in draw_rank_mesh(info).data if trace.type == "scatter"
    }
    assert set(drawn) == {"data", "tensor"}
    assert {trace.x.count(None) for trace in drawn.values()} == {2}  # two pairs of ranks on each axis
