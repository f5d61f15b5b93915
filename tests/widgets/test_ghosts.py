"""Predicted values under measured ones: what is drawn, and which gap is named."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.prediction.job import predict_job
from shardscope_widgets.figures import _ghosts
from shardscope_widgets.figures._compression import compression_info, compression_text, draw_compression
from shardscope_widgets.figures._ghosts import Ghost, GhostPart
from shardscope_widgets.figures._memory_kinds import draw_memory_kinds, memory_kinds_info, memory_kinds_text
from shardscope_widgets.figures._overview import memory_info
from shardscope_widgets.figures._pipeline import draw_gantt, gantt_info, gantt_text
from shardscope_widgets.figures._timeline import timeline_info, timeline_layout
from shardscope_widgets.trace import Trace
from widgets.fake_runs import fake_run, memory_events, schedule_events

HELD = (800_000, 800_000, 1_600_000, 600_000, 0, 100_000)
GHOST = Ghost(
    0.05,
    (GhostPart("forward", "forward", 0.01), GhostPart("communication", "ring_all_gather", 0.04)),
    2_000_000.0,
    (HELD, HELD),
    (3_000_000, 3_000_000),
)


@pytest.fixture
def trace():
    run = fake_run("ring", 2, steps=6)
    run.all_events += memory_events(2)
    return Trace.read(run)


def test_a_prediction_becomes_plain_values():
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2)
    prediction = predict_job(job)
    ghost = _ghosts.ghost_of(prediction)
    assert ghost.sent_bytes == prediction.sent_bytes.sum()
    assert ghost.step_s == prediction.step_time_s == pytest.approx(sum(part.seconds for part in ghost.parts))
    names = [part.name for part in ghost.parts]
    assert names == ["data", "forward", "backward", "ring_all_reduce", "optimizer", "idle"]
    assert len(ghost.held) == 2
    assert max(ghost.held_peaks) == prediction.held_bytes


def test_throughput_bytes_and_memory_get_dashes_at_the_predicted_values(trace):
    (bars,) = memory_info([trace]).runs
    both = bars._replace(ranks=("rank 0", "rank 1"), peaks=(2_000_000, 2_000_000))
    throughput, sent, memory = _ghosts.overview_ghosts(trace, GHOST, both)
    assert throughput["y"] == [2 * 1024 / 0.05] * 2
    assert (sent["x"], sent["y"], sent["line"]["dash"]) == ([1, 6], [2_000_000.0] * 2, "dash")
    assert (memory["x"], memory["offsetgroup"]) == (["rank 0", "rank 1"], bars.label)  # on the run's own bars
    middles = [at + line / 2 for at, line in zip(memory["base"], memory["y"], strict=True)]
    assert middles == pytest.approx([3e6, 3e6])
    assert len(_ghosts.overview_ghosts(trace, GHOST, bars._replace(ranks=("each rank",)))[-1]["y"]) == 1
    assert len(_ghosts.overview_ghosts(trace, GHOST)) == 2


def test_the_larger_gap_of_step_time_and_bytes_is_named(trace):
    slow, many = GHOST._replace(step_s=0.2), GHOST._replace(step_s=trace.step_time_s)
    assert "Largest difference: step time, 200 ms predicted and " in _ghosts.overview_gap(trace, slow)
    assert "Largest difference: bytes per step, 2 MB predicted and 1.6 MB measured." in _ghosts.overview_gap(
        trace, many
    )
    exact = GHOST._replace(sent_bytes=trace.bytes_per_step, step_s=trace.step_time_s)
    assert _ghosts.overview_gap(trace, exact).endswith("Predicted and measured values agree within 2%.")


def test_the_timeline_has_one_more_row_with_the_predicted_step(trace):
    info = timeline_info(trace, num_steps=2)
    forward, sent = _ghosts.timeline_ghosts(info, GHOST)
    assert (forward["base"], forward["x"], forward["y"]) == (list(info.starts_ms), [10.0, 10.0], [2, 2])
    assert sent["base"] == [start + 10.0 for start in info.starts_ms]
    layout = _ghosts.with_ghost_row(info, timeline_layout(info), GHOST)
    assert layout["yaxis"]["ticktext"] == ["rank 0 ", "rank 1 ", "predicted "]
    assert layout["xaxis"]["range"][1] > info.end_ms


def test_the_part_with_the_largest_gap_is_named_below_the_timeline(trace):
    text = _ghosts.timeline_gap(trace, timeline_info(trace), GHOST)
    assert "Largest difference: communication, 40 ms predicted and " in text


def test_memory_by_type_has_a_lighter_bar_below_each_rank(trace):
    info = memory_kinds_info([trace], ghosts={trace.run_id: GHOST})
    lighter = [bar for bar in draw_memory_kinds(info).data if str(bar.name).startswith("predicted ")]
    assert "predicted" in [bar.name for bar in draw_memory_kinds(info).data if bar.showlegend is not False]
    assert [sum(bar.x) for bar in lighter] == [800_000, 800_000, 1_600_000, 0, 0, 0]  # up to the peak
    assert "Largest difference: activations, 600 kB predicted and 305 kB measured." in memory_kinds_text(info)
    assert not any(
        str(bar.name).startswith("predicted ") for bar in draw_memory_kinds(memory_kinds_info([trace])).data
    )


def test_a_pipelines_predicted_passes_lie_below_the_measured_ones():
    run = fake_run("pipeline", 2, steps=1)
    run.all_events += schedule_events(2, 4)
    trace = Trace.read(run)
    trace.schedule = "gpipe"
    ghost = GHOST._replace(
        parts=(GhostPart("forward", "forward", 0.02), GhostPart("backward", "backward", 0.08))
    )
    info = gantt_info(trace, ghost=ghost)
    assert len(info.predicted) == len(info.ops) == 16
    assert {op.duration_ms for op in info.predicted if op.op == "F"} == {5.0}
    assert max(op.start_ms + op.duration_ms for op in info.predicted) == pytest.approx(5 * 5.0 + 5 * 20.0)
    assert sum(str(bar.name).startswith("predicted ") for bar in draw_gantt(info).data) == 2
    assert "Largest difference: a forward pass, 5 ms predicted and 10 ms measured." in gantt_text(info)


def test_the_compression_panel_marks_predicted_bytes_and_times():
    plain, packed = (
        Trace.read(fake_run("ring", 2, steps=6)),
        Trace.read(fake_run("ring", 2, steps=6, run_id="packed")),
    )
    packed.method = packed.method_label = "int8"
    info = compression_info(
        [plain, packed], ghosts={plain.run_id: GHOST, "packed": GHOST._replace(sent_bytes=1.6e6)}
    )
    marks = [each for each in draw_compression(info).data if each.name == "predicted"]
    assert [tuple(each.y) for each in marks] == [(2e6, 1.6e6), (0.05, 0.05)]
    assert "Diamonds: predicted. Largest difference: a step of " in compression_text(info)
    assert not [
        each for each in draw_compression(compression_info([plain, packed])).data if each.name == "predicted"
    ]


def test_steps_that_differ_count_with_their_mean():
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, compression="local-sgd")
    prediction = predict_job(job)
    assert _ghosts.ghost_of(prediction).sent_bytes == pytest.approx(prediction.sent_bytes.sum() / 8)
