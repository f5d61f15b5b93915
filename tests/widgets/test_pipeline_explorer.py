"""The Pipeline Explorer without a browser: what it shows is what was counted."""

from __future__ import annotations

import time

import pytest

from shardscope.analytic.schedules import build
from shardscope.spec.layout import schedule_names
from shardscope_widgets import PipelineExplorer, Trace, figures
from shardscope_widgets.figures import _schedule
from shardscope_widgets.figures._schedule import StepFunction, schedule_json
from shardscope_widgets.pipeline_explorer._comparison import comparison_html, comparison_info
from widgets.fake_runs import schedule_events


def predicted(name="1f1b", stages=2, microbatches=2, **times):
    timeline = build(name, stages, microbatches).timeline(times or {"F": 1.0, "I": 1.0, "W": 1.0})
    return _schedule.schedule_info(timeline, schedule=name)


class TestFigure:
    def test_it_tells_where_everything_runs_and_who_waits(self):
        info = predicted()
        assert [(op.rank, op.op, op.microbatch, op.start_ms) for op in info.gantt.ops][:4] == [
            (0, "F", 0, 0.0),
            (0, "F", 1, 1.0),
            (0, "B", 0, 4.0),
            (0, "B", 1, 7.0),
        ]
        assert info.gantt.end_ms == 9
        assert info.idle_ms == (3, 3)
        assert info.peak == (2, 1)
        assert info.held[1] == StepFunction((0, 1, 7), (0, 1, 0))
        assert info.waiting == StepFunction((0, 1, 2, 4, 6, 7, 9), (1, 0, 1, 0, 1, 1, 1))

    def test_the_area_of_waiting_ranks_is_the_bubble(self):
        for name in schedule_names():
            info = predicted(name, 3, 6, F=1.0, I=1.3, W=0.8)
            at, value = info.waiting
            area = sum((b - a) * count for a, b, count in zip(at, at[1:], value, strict=False))
            assert area == pytest.approx(info.gantt.bubble * info.gantt.end_ms * 3)
            assert sum(info.idle_ms) == pytest.approx(area)

    def test_hovering_says_what_an_operation_needs_and_how_long_its_rank_waited(self):
        info = predicted()
        need, waited = info.waits[2]  # the first backward of rank 0
        assert need.endswith("needs the gradient of stage 1 (rank 1)")
        assert waited == 2
        assert info.waits[0] == ("stage 0, rank 0<br>needs only the input batch", 0)

    def test_it_is_drawn_as_the_measured_chart_is(self):
        trace = Trace("id", "p", "pipeline", world_size=2, schedule="gpipe")
        trace.feed(schedule_events(2, 4))
        timeline = build("gpipe", 2, 4).timeline({"F": 10.0, "B": 20.0})
        ours = [bar for bar in figures.schedule(timeline, schedule="gpipe").data if bar.type == "bar"]
        measured = figures.gantt(trace).data
        assert [(bar.name, bar.width, bar.marker) for bar in ours] == [
            (bar.name, bar.width, bar.marker) for bar in measured
        ]
        assert [self.places(bar) for bar in ours] == [self.places(bar) for bar in measured]

    @staticmethod
    def places(bar):
        rows = zip(bar.y, bar.base, bar.x, bar.text, strict=True)
        return sorted((rank, round(base, 2), round(length, 2), text) for rank, base, length, text in rows)

    def test_words_say_what_the_figure_shows(self):
        text = _schedule.schedule_text(predicted("zbv", 4, 8, F=5.0, I=5.0, W=5.0))
        assert text.startswith(
            "ZB-V: 8 micro-batches through 8 stages on 4 ranks take 255 ms. Ranks are idle for 5.9% of this time"
        )

    def test_lines_of_ranks_and_lighter_colours_have_keys(self):
        drawn = schedule_json(predicted("interleaved", 2, 4))
        lines = [trace for trace in drawn["data"] if trace.get("yaxis") == "y2"]
        for line, name in zip(lines, drawn["layout"]["yaxis"]["ticktext"], strict=True):
            assert name.startswith(line["name"])
            assert line["line"]["color"] in name
        keys = [trace["name"] for trace in drawn["data"] if trace["showlegend"]]
        assert sorted(keys) == ["backward", "fainter: later stages of the rank", "forward"]

    def test_numbers_of_micro_batches_go_where_bars_are_too_narrow(self):
        few, many = (schedule_json(predicted("1f1b", p, m)) for p, m in ((2, 4), (16, 64)))
        assert few["data"][0]["textposition"] == "inside"
        assert many["data"][0]["textposition"] == "none"


class TestComparison:
    def test_every_row_is_what_its_table_counts(self):
        rows = comparison_info(4, 8, virtual_stages=2, t_f=0.01, t_input=0.01, t_weight=0.01)
        assert [row.name for row in rows] == list(schedule_names())
        for row in rows:
            table = build(row.name, 4, 8, row.virtual_stages)
            part = 0.01 / row.virtual_stages
            timeline = table.timeline({"F": part, "I": part, "W": part})
            assert row.step_s == pytest.approx(timeline.end)
            assert row.bubble == pytest.approx(timeline.bubble_fraction)
            assert row.held == max(table.peak_activation())

    def test_what_cannot_be_says_why(self):
        row = next(
            row
            for row in comparison_info(8, 4, virtual_stages=2, t_f=1, t_input=1, t_weight=1)
            if row.name == "dualpipev"
        )
        assert row.problem == "needs at least 16 micro-batches"
        assert "needs at least 16 micro-batches" in comparison_html([row], "1f1b")

    def test_the_selected_row_is_marked_for_eye_and_ear(self):
        html = comparison_html(comparison_info(4, 8, virtual_stages=2, t_f=1, t_input=1, t_weight=1), "zbv")
        assert html.count('aria-current="true"') == 1
        assert html.index('aria-current="true"') < html.index(">ZB-V<")


class TestExplorer:
    def test_work_that_takes_no_time_is_shown_too(self):
        explorer = PipelineExplorer(t_f=0.0, t_input=0.0, t_weight=0.0)
        assert "bubble 0.0%" in explorer._status.value

    def test_an_unknown_choice_is_refused(self):
        with pytest.raises(TypeError, match="no option 'stage'"):
            PipelineExplorer(stage=3)

    def test_it_shows_what_was_counted_beside_the_closed_form(self):
        explorer = PipelineExplorer(schedule="zb-h1", stages=4, microbatches=8)
        assert explorer.timeline.bubble_fraction == pytest.approx(3 / 27)
        assert "bubble 11.1%, as the closed-form formula predicts." in explorer._status.value
        explorer.send = 2.0
        assert (
            "gives a bubble of 11.1% for stages of equal cost without communication time"
            in explorer._status.value
        )

    def test_controls_and_traits_are_one(self):
        explorer = PipelineExplorer()
        explorer.controls["stages"].value = 6
        assert len(explorer.timeline.table.ranks) == 6
        explorer.schedule = "zbv"
        assert explorer.controls["schedule"].value == "zbv"
        assert len(explorer.figure.traces) == 3 * 2 + 6 + 1

    def test_an_impossible_choice_says_so_and_the_next_possible_one_is_shown(self):
        explorer = PipelineExplorer(schedule="1f1b", stages=8, microbatches=4)
        assert explorer.timeline is None
        assert "microbatches=4: the 1f1b schedule on 8 ranks needs at least 8" in explorer._status.value
        assert explorer.figure.layout.display == "none"
        explorer.microbatches = 8
        assert explorer.timeline is not None
        assert explorer.figure.layout.display is None

    def test_a_longer_last_stage_makes_the_bubble_larger(self):
        explorer = PipelineExplorer(stages=4, microbatches=16)
        even = explorer.timeline.bubble_fraction
        explorer.last_stage = 1.5
        assert explorer.timeline.bubble_fraction > even

    @pytest.mark.parametrize("slider", ["t_input", "microbatches"])
    def test_a_slider_is_followed_within_milliseconds_of_work(self, slider):
        explorer = PipelineExplorer(stages=8, microbatches=26)
        for name in schedule_names():
            explorer.set_trait("microbatches", 26)
            explorer.set_trait("schedule", name)
            first = getattr(explorer, slider)
            # 10 ms is the aim; slower machines pass too, and a core that others share is slower for a while
            assert any(took_s(explorer, slider, first + 1 + n % 6) < 0.040 for n in range(40)), name


def took_s(explorer, slider, value):
    """Seconds of this thread's own, not of the clock on the wall: other work on the machine is not ours."""
    start = time.thread_time()
    explorer.set_trait(slider, value)
    return time.thread_time() - start
