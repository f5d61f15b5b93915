"""The data halves of the figures, compared by value; the drawings only as far as that they can be drawn."""

from __future__ import annotations

import math
import sys
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.events import step_event
from shardscope.runlog.spans import union
from shardscope.runlog.steps import Step, Steps
from shardscope.spec import Job
from shardscope_widgets import figures
from shardscope_widgets.figures import _comparison, _curves, _timeline, theme
from shardscope_widgets.figures._curves import Curve, LossView, moving_average
from shardscope_widgets.figures._timeline import Shares, SpanBar
from shardscope_widgets.trace import Trace
from widgets.fake_runs import fake_run, memory_events


def trace_of(*losses: float, strategy: str = "ring") -> Trace:
    steps = [
        Step(n, loss=loss, step_time_s=0.5, samples=16, tokens=1024, sent_bytes=1000 * n)
        for n, loss in enumerate(losses, start=1)
    ]
    return Trace(
        run_id="id",
        label="run",
        strategy=strategy,
        world_size=2,
        group="mlp on digits",
        job=Job(model="mlp", data="digits", strategy=strategy, seed=1),
        steps=Steps(steps),
    )


class TestCurves:
    def test_without_smoothing_only_the_values_are_drawn(self):
        info = _curves.loss_info([trace_of(3.0, 2.0)], LossView(0))
        (look,) = theme.run_looks([Trace("id", "run", "ring", world_size=2)])
        assert info.curves == (Curve("run", look, (1, 2), (3.0, 2.0), (3.0, 2.0)),)

    def test_the_average_has_the_span_that_the_heading_states(self):
        info = _curves.loss_info([trace_of(3.0, 2.0, 1.0)], LossView(3))
        assert info.curves[0].smooth == pytest.approx((86 / 31, 2.0, 38 / 31))
        assert (
            "exponential average over 3 steps"
            in figures.loss([trace_of(3.0)], smoothing=3).layout.xaxis.title.text
        )

    def test_a_mark_says_where_the_number_of_ranks_changed(self):
        trace = trace_of(3.0, 2.0, 1.0, 0.5)
        trace.steps = Steps(
            step._replace(world_size=size) for step, size in zip(trace.steps, (2, 2, 4, 3), strict=True)
        )
        notes = figures.throughput([trace]).layout.annotations
        assert [(note.x, note.text) for note in notes] == [(3, "4 ranks"), (4, "3 ranks")]
        assert "run: 4 ranks" in [
            note.text for note in figures.overview([trace, trace_of(3.0)]).layout.annotations
        ]

    def test_a_diverged_run_does_not_flatten_the_others(self):
        good, bad = trace_of(3.0, 2.0, 1.0), trace_of(3.0, 50.0, 900.0, 2000.0, 2460.0)
        bad.label = "lr 5"
        figure = figures.loss([good, bad])
        assert figure.layout.yaxis.range == pytest.approx((0.88, 3.12))
        assert [note.text for note in figure.layout.annotations] == ["▲ lr 5: off the scale, up to 2,460.0"]
        assert "diverged" in figure.data[3].hovertemplate
        logarithmic = figures.loss([good, bad], is_log=True)
        assert (logarithmic.layout.yaxis.type, logarithmic.layout.yaxis.range) == ("log", None)
        assert figures.loss([bad]).layout.yaxis.range is None, "alone, it has the whole axis"

    def test_what_is_not_finite_leaves_a_gap(self):
        (curve,) = _curves.loss_info([trace_of(3.0, math.nan, 1.0)]).curves
        assert curve.values == (3.0, None, 1.0)

    def test_throughput_counts_tokens_only_if_every_run_does(self):
        images = Trace(
            run_id="id", label="images", strategy="ring", world_size=1,
            steps=Steps([Step(1, loss=1.0, step_time_s=0.5, samples=16)]),
        )  # fmt: skip
        assert _curves.throughput_info([trace_of(1.0)]).unit == "tokens/s"
        assert _curves.throughput_info([trace_of(1.0), images]).unit == "samples/s"

    def test_bytes_are_exact_and_never_smoothed(self):
        (curve,) = _curves.traffic_info([trace_of(*range(20))]).curves
        assert curve.smooth == curve.values == tuple(1000 * n for n in range(1, 21))

    def test_a_long_run_is_thinned(self):
        (curve,) = _curves.loss_info([trace_of(*range(10_000))]).curves
        assert len(curve.steps) == len(curve.values) <= 600

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1))
    def test_an_average_stays_within_what_it_averages(self, values):
        slack = 1e-6 + 1e-9 * max(map(abs, values))
        means = moving_average(values, span=10)
        assert len(means) == len(values)
        assert all(min(values) - slack <= mean <= max(values) + slack for mean in means)

    def test_an_average_of_a_falling_loss_runs_through_it_and_not_above(self):
        values = [5.0 - 0.1 * step for step in range(40)]
        means = moving_average(values, span=10)
        assert means[10:30].tolist() == pytest.approx(values[10:30], abs=0.02)
        assert means[-1] - values[-1] < 0.21  # the newest step has no later ones

    def test_an_average_smooths_as_much_as_one_over_so_many_values(self):
        means = moving_average([*[0.0] * 50, 1.0, *[0.0] * 50], span=10)
        assert sum(mean**2 for mean in means) == pytest.approx(1 / 10, rel=0.05)
        every_step = moving_average(range(100), span=10)
        assert moving_average(range(100), span=10, every=7) == every_step[::7]

    def test_an_average_leaves_out_values_that_are_not_finite(self):
        means = moving_average([1.0, math.nan, 1.0], span=10)
        assert means.tolist() == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)


class TestSteps:
    steps = (
        Step(1, 0.5, 2.5, 0.5, 32, 0, 0.1, 1.0, 7, compute_s=0.25),
        Step(2, 1.5, math.inf, 0.25, 64, 2048, 0.1, 2.0, 2**40, compute_s=0.5),
    )

    def test_they_come_back_as_they_were_put_in(self):
        steps = Steps(self.steps)
        assert tuple(steps) == self.steps
        assert (steps[0], steps[-1], len(steps)) == (*self.steps, 2)

    def test_a_step_takes_eight_bytes_a_column(self):
        steps = Steps(
            Step(n, loss=1.0 / n, step_time_s=0.1 * n, samples=n, sent_bytes=10**6 + n)
            for n in range(1, 10_001)
        )
        held = sum(sys.getsizeof(column) for column in steps._columns)
        assert 1 <= held / len(steps) / (8 * len(Step._fields)) < 1.25  # arrays grow ahead by an eighth


class TestTimeline:
    trace = Trace("id", "run", "ring", world_size=1)
    spans: ClassVar = [
        ["compute", "forward", 5.000, 5.004, 0],
        ["communication", "all_reduce", 5.002, 5.006, 64],
        ["compute", "optimizer", 5.008, 5.010, 0],
    ]
    trace.feed([step_event(1, step_time_s=0.01, spans=spans)])

    def test_idle_is_what_no_lane_covers(self):
        info = _timeline.timeline_info(self.trace)
        (idle,) = [bar for bar in info.bars if bar.name == "idle"]
        assert (idle.start_ms, idle.start_ms + idle.duration_ms) == pytest.approx((6, 8), abs=1e-3)
        assert SpanBar(0, "communication", "all_reduce", 2.0, 4.0, 64, 1) in info.bars

    def test_communication_beside_compute_counts_as_hidden(self):
        assert _timeline.timeline_info(self.trace).shares == pytest.approx(
            Shares(0.6, 0.4, 0.2, 0.2), abs=1e-3
        )

    def test_it_is_also_there_in_words(self):
        text = _timeline.timeline_text(_timeline.timeline_info(self.trace))
        assert text == (
            "run, step 1 (10 ms): on average, a rank spends 40% computing only, 40% communicating or waiting "
            "(including 20% in which it also computes) and 20% idle."
        )

    def test_the_window_never_spans_steps_that_were_not_recorded(self):
        trace = Trace.read(fake_run("ring", 2, steps=9))
        del trace.spans[8]
        assert _timeline.timeline_info(trace, num_steps=3).steps == (9,)
        assert _timeline.timeline_info(trace, last_step=7, num_steps=3).steps == (5, 6, 7)
        info = _timeline.timeline_info(trace)
        assert _timeline.gap_text(info, [6, 7, 9], 2) == "The previous recorded step is step 7. "
        assert _timeline.gap_text(info, [6, 7, 9], 1) == _timeline.gap_text(info, [9], 2) == ""

    def test_a_run_without_spans_says_so(self):
        assert "No step has finished yet" in _timeline.timeline_text(
            _timeline.timeline_info(Trace("id", "run", "ring", world_size=2))
        )

    @given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple)))
    def test_a_union_covers_each_point_once(self, intervals):
        points = {p for start, end in intervals for p in range(start, end)}
        assert sum(end - start for start, end in union(intervals)) == len(points)


class TestComparison:
    def test_speed_is_against_the_single_process_of_the_same_workload(self):
        single = trace_of(1.0, 1.0, 1.0, strategy="single")
        single.world_size = 1
        double = trace_of(1.0, 1.0, 1.0)
        double.steps = Steps(step._replace(tokens=2048) for step in double.steps)
        other = trace_of(1.0, 1.0, 1.0)
        other.job = Job(model="mlp", data="digits", batch=128)
        again = trace_of(1.0, 1.0, 1.0, strategy="single")
        again.world_size, again.job = 1, Job(model="mlp", data="digits", strategy="single", batch=256)
        speeds = [row.speed for row in _comparison.comparison_info([single, double, other, again])]
        assert speeds == [1.0, 2.0, None, 1.0], "another batch is another workload"

    def test_a_run_without_steps_has_a_row_of_dashes(self):
        (row,) = _comparison.comparison_info([Trace("id", "run", "ring", world_size=4)])
        assert row.cells() == ("run", "4", "0", *["–"] * 9)
        assert row._replace(step_time_s=1.0, predicted_s=1.06).cells()[-1] == "+6%"


class TestLook:
    def test_no_two_runs_look_the_same(self):
        names = ("ring", "all-reduce", "single", "ring", "ring", "single")
        layer_samples = theme.run_looks([Trace("id", "run", name, world_size=2) for name in names])
        assert len({(look.colour, look.dash) for look in layer_samples}) == 6
        assert len({look.dash for look in layer_samples[:3]}) == 3, "strategies differ without colour too"

    def test_a_new_strategy_has_a_colour_that_stays(self):
        assert theme.strategy_colour("zero-3") == theme.strategy_colour("zero-3")

    def test_memory_is_the_peak_of_tensors_with_the_states_below_the_rest(self):
        run = fake_run("ring", 2, steps=3)
        run.all_events += memory_events(2)
        traces = [Trace.read(run)]
        info = figures.info(figures.memory, traces)
        (bars,) = info.runs  # both ranks hold about the same
        assert (bars.ranks, bars.states, bars.peaks) == (("each rank",), (3_200_000,), (3_610_000,))
        states, rest = figures.memory(traces).data
        assert (states.y, rest.base, rest.y) == ((3_200_000,), (3_200_000,), (410_000,))
        assert rest.opacity < 1 and [bar.showlegend for bar in (states, rest)] == [True, False]
        assert info.title[0] == "Peak memory per rank"

    def test_a_run_that_reports_no_types_of_memory_has_the_growth_of_its_processes(self):
        info = figures.info(figures.memory, [Trace.read(fake_run("ring", 2, steps=3))])
        assert (info.title[0], info.runs[0].ranks) == ("Process memory growth per rank", ("rank 0", "rank 1"))

    def test_everything_can_be_drawn(self):
        traces = [Trace.read(fake_run(kind, 3, steps=12)) for kind in ("single", "all-reduce", "ring")]
        for draw in (
            figures.loss,
            figures.throughput,
            figures.traffic,
            figures.memory,
            figures.overview,
            figures.comparison,
        ):
            assert draw(traces).data
        assert figures.timeline(traces[2]).data
        assert figures.overview([]).layout.height


def test_every_figure_keeps_the_column_of_buttons_clear() -> None:
    assert theme.look(height=100)["margin"]["r"] == theme.MODEBAR_WIDTH
    assert theme.look(height=100, margin={"l": 8})["margin"] == {"l": 8, "r": theme.MODEBAR_WIDTH}
    assert theme.look(height=100, margin={"r": 92})["margin"]["r"] == 92
