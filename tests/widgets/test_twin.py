"""The Twin: a run that trained on two ranks, beside its prediction and its simulation."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import shardscope as ss
from shardscope.measure.accuracy import inside_text
from shardscope.measure.compare.measured import REST
from shardscope.runlog.step_events import MESSAGE, StepEvent, StepEvents
from shardscope.spec.look import Arrangement
from shardscope_widgets import Twin, figures
from shardscope_widgets.figures import _residual, _twin
from shardscope_widgets.figures._ghosts import GhostPart
from shardscope_widgets.figures._residual import residual_parts
from shardscope_widgets.figures._twin import MOST_RANKS, twin_parts
from shardscope_widgets.twin._findings import Findings
from widgets.made_comparison import made_comparison

PARTS = (GhostPart("forward", "forward", 0.002), GhostPart("communication", "all_reduce", 0.001))


def step_of(origin, world_size=2, *events):
    spans = [StepEvent(rank, "compute", "forward", 0.001, 0.003) for rank in range(world_size)]
    return StepEvents(origin, origin, Arrangement(), world_size, 4, 0.01, (*spans, *events))


def message(rank, peer, start, end, kind="all_reduce"):
    return StepEvent(rank, MESSAGE, kind, start, end, peer, 8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs: one on the cores of this machine and, the newer one, one that a pipeline trained."""
    root = tmp_path_factory.mktemp("runs")
    usual = {"model": "gpt-nano", "data": "python-source", "world_size": 2, "batch": 8, "steps": 5}
    for strategy in ("ring", "pipeline"):
        ss.launch(ss.Job(**usual, strategy=strategy, name=strategy), root=root).wait(timeout=120)
    return root


@pytest.fixture(scope="module")
def twin(trained):
    shown = Twin(root=trained, against="simulated")
    shown.wait(120)
    return shown


class TestFigures:
    def test_a_message_counts_as_communication_of_both_ranks_and_touching_ones_are_one_bar(self):
        sent = [message(0, 1, 0.003, 0.004), message(1, 0, 0.004, 0.006)]
        (first, second) = _twin.twin_info(step_of("simulated", 2, *sent)).rows
        for row in (first, second):
            assert [(bar.name, bar.start_ms, bar.duration_ms) for bar in row.bars] == [
                ("forward", 1.0, 2.0), ("all_reduce", 3.0, pytest.approx(3.0)),
            ]  # fmt: skip
            assert (row.start_ms, row.total_ms) == (1.0, pytest.approx(5.0))

    def test_a_receiver_of_a_pipelines_message_waits_and_is_idle(self):
        info = _twin.twin_info(step_of("measured", 2, message(0, 1, 0.003, 0.005, "send")))
        names = [[bar.name for bar in row.bars] for row in info.rows]
        assert names == [["forward", "send"], ["forward", "recv"]]
        assert [row.busy_ms for row in info.rows] == [pytest.approx(4.0), pytest.approx(2.0)]

    def test_a_recorded_collective_is_not_drawn_twice_because_its_messages_are_known(self):
        span = [StepEvent(rank, "communication", "all_reduce", 0.003, 0.006) for rank in range(2)]
        info = _twin.twin_info(step_of("measured", 2, *span, message(0, 1, 0.003, 0.004)))
        assert [bar.name for bar in info.rows[1].bars] == ["forward", "all_reduce"]

    def test_rows_of_a_rank_are_next_to_each_other_and_the_prediction_is_last(self):
        info = _twin.twin_info(step_of("measured"), step_of("simulated"), PARTS)
        assert [(row.rank, row.origin) for row in info.rows] == [
            (0, "measured"), (0, "simulated"), (1, "measured"), (1, "simulated"), (None, "predicted"),
        ]  # fmt: skip
        assert info.rows[-1].total_ms == pytest.approx(3.0)
        traces, layout = twin_parts(info)
        assert {trace["name"] for trace in traces} == {"idle", "forward", "all-reduce"}
        assert sum(trace["showlegend"] for trace in traces) == 3
        assert layout["xaxis"]["range"][1] > 3.0

    def test_only_the_first_ranks_of_many_are_drawn(self):
        info = _twin.twin_info(step_of("measured", MOST_RANKS + 4))
        assert (len(info.rows), info.hidden) == (MOST_RANKS, 4)
        assert "of 12 are drawn" in _twin.twin_text(info)

    def test_step_times_are_drawn_as_far_as_they_are_known(self):
        rows = [figures.StepTimesRow("a", 0.1, 0.2), figures.StepTimesRow("b", 0.3)]
        before = figures.step_times(rows)
        assert [(bar.name, bar.x) for bar in before.data] == [
            ("predicted", (0.1, 0.3)),
            ("simulated", (0.2, None)),
        ]
        after = figures.step_times([rows[0]._replace(measured=0.15), rows[1]])
        assert [bar.name for bar in after.data] == ["predicted", "simulated", "measured"]
        assert after.data[-1].text == (" 150 ms", "")

    def test_bars_of_the_waterfall_lead_from_the_expected_to_the_measured_step(self):
        info = _residual.residual_info(made_comparison().residual())
        assert info.bars[0].label == "predicted step"
        assert info.bars[-1].label == "measured step"
        inner = info.bars[1:-1]
        assert all(a.end_ms == pytest.approx(b.start_ms) for a, b in pairwise(inner))
        assert inner[0].start_ms == info.bars[0].end_ms
        assert inner[-1].end_ms == pytest.approx(info.bars[-1].end_ms)
        assert inner[-1].label == REST
        (trace,), _ = residual_parts(info)
        assert min(trace["x"]) > 0


class TestPanel:
    def test_it_shows_the_newest_run_with_all_three_columns(self, twin):
        assert twin.run.name == "pipeline"
        assert twin.problem == ""
        assert twin.comparison.columns == ("predicted", "simulated", "measured")
        assert "<td" in twin.screen.table.value
        assert twin.findings.simulated.origin == "simulated"

    def test_its_heading_says_how_often_predictions_were_right(self, twin):
        twin._hit_rate.wait(60)
        found = ss.accuracy(twin.run.path.parent)
        assert twin.screen.frame.about.startswith(f"{inside_text(found.runs)} · ")
        assert found.headline.startswith(inside_text(found.runs))

    def test_the_drawn_step_can_be_chosen(self, twin):
        before = twin.screen.gantt.figure
        other = next(step for step in twin.findings.steps if step != twin.findings.typical)
        twin.step = other
        assert f"Step {other}:" in twin.screen.words.value
        assert twin.screen.gantt.figure != before
        twin.screen.step.value = 0
        assert twin.step == 0
        twin.step = 99  # no such step
        assert twin.step == 0

    def test_the_waterfall_starts_from_the_chosen_column(self, twin):
        assert twin.screen.against.value == "simulated"
        assert twin.screen.residual.traces[0]["y"][0] == "simulated step"
        twin.screen.against.value = "predicted"
        assert twin.screen.residual.traces[0]["y"][0] == "predicted step"

    def test_another_run_can_be_chosen(self, twin):
        (other,) = [run_id for _, run_id in twin.screen.run.options if run_id.endswith("ring")]
        twin.screen.run.value = other
        twin.wait(120)
        assert twin.run_id == other
        assert twin.comparison["bytes", "ring_all_reduce"].simulated > 0

    def test_an_error_hides_the_table_of_the_run_before(self, twin, monkeypatch):
        def fails(run, where, job):
            raise ss.SpecError("the run is damaged")

        assert twin.screen.details.layout.display is None
        with monkeypatch.context() as patch:
            patch.setattr(Findings, "of", fails)
            twin.refresh()
            twin.wait(60)
        assert "cannot be compared" in twin.screen.status.value
        assert "the run is damaged" in twin.problem
        assert twin.screen.details.layout.display == "none"

    def test_an_unknown_run_is_named(self, twin):
        before = twin.run_id
        twin.run_id = "no-such-run"
        assert "no-such-run" in twin.screen.status.value
        assert twin.screen.details.layout.display == "none"
        twin.run_id = before
        twin.wait(120)
        assert twin.comparison is not None

    def test_a_run_without_emulated_links_is_predicted_for_this_machine_only(self, twin):
        assert twin.screen.where.disabled
        assert [text for text, _ in twin.screen.where.options] == ["this machine"]


def test_a_recorded_training_loop_has_bytes_and_memory_but_no_expected_step(tmp_path):
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ss.observe(model, optimizer, root=tmp_path) as run:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    twin = Twin(run, root=tmp_path)
    twin.wait(60)
    assert twin.problem == ""
    assert twin.comparison.columns == ("predicted", "measured")
    assert twin.screen.against.disabled
    assert "The step time of this run cannot be divided into parts" in twin.screen.explained.value
    assert {row.origin for row in twin_rows(twin)} == {"measured"}


def twin_rows(twin):
    found = twin.findings
    return _twin.twin_info(found.measured(found.typical), found.simulated, found.predicted).rows


def test_without_runs_it_says_how_to_launch_one(tmp_path):
    twin = Twin(root=tmp_path)
    assert "ss.launch" in twin.screen.status.value
    assert twin.comparison is None


def test_an_unknown_option_is_named(tmp_path):
    with pytest.raises(TypeError, match="no option 'runs'"):
        Twin(root=tmp_path, runs=3)
