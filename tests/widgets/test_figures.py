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
from shardscope_widgets import figures
from shardscope_widgets.figures import Curve, Shares, SpanBar, theme
from shardscope_widgets.figures._curves import moving_average
from shardscope_widgets.trace import Trace
from widgets.fake_runs import fake_run, step_events


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
        workload="mlp on digits",
        steps=Steps(steps),
    )


class TestCurves:
    def test_few_points_are_not_smoothed(self):
        info = figures.loss_info([trace_of(3.0, 2.0)])
        assert info.curves == (Curve("run", "ring", (1, 2), (3.0, 2.0), (3.0, 2.0)),)

    def test_what_is_not_finite_leaves_a_gap(self):
        (curve,) = figures.loss_info([trace_of(3.0, math.nan, 1.0)]).curves
        assert curve.values == (3.0, None, 1.0)

    def test_throughput_counts_tokens_only_if_every_run_does(self):
        images = Trace(
            run_id="id", label="images", strategy="ring", world_size=1,
            steps=Steps([Step(1, loss=1.0, step_time_s=0.5, samples=16)]),
        )  # fmt: skip
        assert figures.throughput_info([trace_of(1.0)]).unit == "tokens/s"
        assert figures.throughput_info([trace_of(1.0), images]).unit == "samples/s"

    def test_bytes_are_exact_and_never_smoothed(self):
        (curve,) = figures.traffic_info([trace_of(*range(20))]).curves
        assert curve.smooth == curve.values == tuple(1000 * n for n in range(1, 21))

    def test_a_long_run_is_thinned(self):
        (curve,) = figures.loss_info([trace_of(*range(10_000))]).curves
        assert len(curve.steps) == len(curve.values) <= 600

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1))
    def test_an_average_stays_within_what_it_averages(self, values):
        slack = 1e-6 + 1e-9 * max(map(abs, values))
        means = moving_average(values, count=len(values))
        assert len(means) == len(values)
        assert all(min(values) - slack <= mean <= max(values) + slack for mean in means)


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
        info = figures.timeline_info(self.trace)
        (idle,) = [bar for bar in info.bars if bar.name == "idle"]
        assert (idle.start_ms, idle.start_ms + idle.duration_ms) == pytest.approx((6, 8), abs=1e-3)
        assert SpanBar(0, "communication", "all_reduce", 2.0, 4.0, 64, 1) in info.bars

    def test_communication_beside_compute_counts_as_hidden(self):
        assert figures.timeline_info(self.trace).shares == pytest.approx(Shares(0.6, 0.4, 0.2, 0.2), abs=1e-3)

    def test_it_is_also_there_in_words(self):
        text = figures.timeline_text(figures.timeline_info(self.trace))
        assert text == (
            "run, step 1, 10 ms: on average, a rank spends 60% computing, 40% communicating (50% of it "
            "hidden by compute) and 20% idle."
        )

    def test_the_window_never_spans_steps_that_were_not_recorded(self):
        trace = Trace.read(fake_run("ring", 2, steps=9))
        del trace.spans[8]
        assert figures.timeline_info(trace, num_steps=3).steps == (9,)
        assert figures.timeline_info(trace, last_step=7, num_steps=3).steps == (5, 6, 7)

    def test_a_run_without_spans_says_so(self):
        assert "No spans yet" in figures.timeline_text(
            figures.timeline_info(Trace("id", "run", "ring", world_size=2))
        )

    @given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple)))
    def test_a_union_covers_each_point_once(self, intervals):
        points = {p for start, end in intervals for p in range(start, end)}
        assert sum(end - start for start, end in union(intervals)) == len(points)


class TestRing:
    @pytest.mark.parametrize("world_size", [2, 3, 4, 7])
    def test_after_all_rounds_every_chunk_is_whole_everywhere(self, world_size):
        info = figures.ring_info(Trace.read(fake_run("ring", world_size, steps=1, chunks=True)))
        assert len(info.rounds) == 2 * (world_size - 1)
        assert set(info.counts[0][0][0]) == {1}
        assert {count for rank in info.counts[-1][0] for count in rank} == {world_size}

    def test_after_the_scatter_each_rank_holds_one_whole_chunk(self):
        info = figures.ring_info(Trace.read(fake_run("ring", 4, steps=1, chunks=True)))
        assert [rank.count(4) for rank in info.counts[3][0]] == [1, 1, 1, 1]

    def test_the_slices_of_a_chunk_are_one_transfer(self):
        run = fake_run("ring", 2, steps=1, chunks=True)
        whole = figures.ring_info(Trace.read(run))
        for event in [event for event in run.all_events if event["event"] == "chunk"]:
            half = event | {"bytes": event["bytes"] // 2}
            run.all_events.remove(event)
            run.all_events += [half | {"slice": 0}, half | {"slice": 1}]
        assert figures.ring_info(Trace.read(run)) == whole

    def test_chunks_without_a_step_belong_to_the_step_under_way(self):
        trace = Trace("id", "run", "ring", world_size=2)
        for step in (1, 2):
            events = step_events("ring", 2, step, chunks=True)
            steps = [event for event in events if event["event"] == "step"]
            chunks = [
                {k: v for k, v in event.items() if k != "step"}
                for event in events
                if event["event"] == "chunk"
            ]
            trace.feed(chunks + steps)
        assert {step: len(chunks) for step, chunks in trace.chunks.items()} == {1: 4, 2: 4}


class TestComparison:
    def test_speed_is_against_the_single_process_of_the_same_workload(self):
        single = trace_of(1.0, 1.0, 1.0, strategy="single")
        single.world_size = 1
        double = trace_of(1.0, 1.0, 1.0)
        double.steps = Steps(step._replace(tokens=2048) for step in double.steps)
        other = trace_of(1.0, 1.0, 1.0)
        other.workload = "cnn on digits"
        assert [row.speed for row in figures.comparison_info([single, double, other])] == [1.0, 2.0, None]

    def test_a_run_without_steps_has_a_row_of_dashes(self):
        (row,) = figures.comparison_info([Trace("id", "run", "ring", world_size=4)])
        assert row.cells() == ("run", "4", "0", "–", "–", "–", "–", "–", "–")


class TestLook:
    def test_no_two_runs_look_the_same(self):
        layer_samples = theme.run_looks(["ring", "all-reduce", "single", "ring", "ring", "single"])
        assert len({(look.colour, look.dash) for look in layer_samples}) == 6
        assert len({look.dash for look in layer_samples[:3]}) == 3, "strategies differ without colour too"

    def test_a_new_strategy_has_a_colour_that_stays(self):
        assert theme.strategy_colour("zero-3") == theme.strategy_colour("zero-3")

    def test_everything_can_be_drawn(self):
        traces = [
            Trace.read(fake_run(kind, 3, steps=12, chunks=kind == "ring"))
            for kind in ("single", "all-reduce", "ring")
        ]
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
        assert figures.ring(traces[2]).data
        assert figures.overview([]).layout.height
