"""Memory by kind, the pipeline's chart, staleness and consensus: their data compared by value."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

import shardscope as ss
from shardscope import Pipeline
from shardscope.runlog.schema import Moved
from shardscope.spec import Batch, Job
from shardscope_widgets import figures
from shardscope_widgets.figures import _consensus, _links, _memory_kinds, _pipeline, _staleness, theme
from shardscope_widgets.figures._stacks import RunBars, StackBar
from shardscope_widgets.figures._staleness import MOST_POINTS
from shardscope_widgets.trace import Trace
from widgets.fake_runs import consensus_events, fake_run, memory_events, schedule_events, update_events


def trace_of(events, strategy="pipeline", world_size=2, **about) -> Trace:
    trace = Trace("id", strategy, strategy, world_size=world_size, **about)
    trace.feed(events)
    return trace


class TestMemoryKinds:
    def test_each_rank_is_one_bar_of_the_newest_step(self):
        trace = trace_of(memory_events(2, step=1, activations=1) + memory_events(2, step=2), "zero-1")
        (run,) = _memory_kinds.memory_kinds_info([trace]).runs
        assert run == RunBars(
            "zero-1",
            (
                StackBar("rank 0", (800_000, 800_000, 1_600_000, 300_000, 0, 100_000), 3_600_000),
                StackBar("rank 1", (800_000, 800_000, 1_600_000, 310_000, 0, 100_000), 3_610_000),
            ),
        )
        assert run.most == 3_610_000

    def test_one_process_is_a_line_at_what_it_holds(self):
        alone = trace_of(memory_events(1), "single", 1)
        info = _memory_kinds.memory_kinds_info([trace_of(memory_events(2, shards=2), "zero-1")], alone=alone)
        assert info.alone == 3_600_000
        (line,) = figures.memory_kinds([trace_of(memory_events(2), "zero-1")], alone=alone).layout.shapes
        assert line.x0 == line.x1 == 3_600_000

    def test_runs_that_do_not_tell_are_left_out(self):
        assert _memory_kinds.memory_kinds_info([Trace("id", "old", "ring", world_size=2)]).runs == ()
        assert "No run" in _memory_kinds.memory_kinds_text(_memory_kinds.memory_kinds_info([]))

    def test_a_server_is_named(self):
        trace = Trace("id", "parameter-server", "parameter-server", world_size=1)
        trace.feed([{"event": "start", "t": 0.0, "rank": 0, "role": "server"}, *memory_events(1)])
        assert _memory_kinds.memory_kinds_info([trace]).runs[0].bars[0].name == "rank 0, server"

    def test_it_is_also_there_in_words(self):
        info = _memory_kinds.memory_kinds_info([trace_of(memory_events(1, activations=0), "zero-1", 1)])
        assert _memory_kinds.memory_kinds_text(info) == (
            "zero-1: peak memory per rank 3.3 MB; by type: 1.6 MB optimizer state, 800 kB parameters, 800 kB "
            "gradients and 100 kB buffers."
        )

    def test_ranks_that_hold_the_same_are_one_bar_and_states_are_compared(self):
        runs = [
            trace_of(memory_events(4, shards=shards, activations=0), name, 4)
            for name, shards in (("ring", 1), ("zero-1", 4))
        ]
        for run in runs:
            run.held = dict.fromkeys(range(4), run.held[0])
        info = _memory_kinds.memory_kinds_info(runs)
        figure = _memory_kinds.draw_memory_kinds(info, chosen="zero-1")
        assert [len(bar.x) for bar in figure.data if bar.type == "bar"] == [2] * 6
        chosen = [text.startswith("<b>") for text in figure.layout.yaxis.ticktext]
        assert chosen == [False, True]
        assert len(figure.layout.shapes) == 1
        assert _memory_kinds.states_text(info) == (
            "zero-1 holds 62% of the model states of ring: 2 MB instead of 3.2 MB on each rank."
        )
        assert _memory_kinds.states_text(_memory_kinds.memory_kinds_info(runs[:1])) == ""

    def test_states_of_unequal_ranks_are_those_of_the_rank_that_holds_most(self):
        runs = [
            trace_of(memory_events(2, shards=shards), name, 2) for name, shards in (("even", 2), ("cut", 1))
        ]
        runs[1].held[1] = runs[0].held[1]
        said = _memory_kinds.states_text(_memory_kinds.memory_kinds_info(runs))
        assert said == (
            "even holds 75% of the model states of cut: 2.4 MB instead of 3.2 MB on the rank that holds the most."
        )

    def test_a_bar_ends_at_its_peak_and_only_faint_types_give_way(self):
        trace = trace_of([event | {"peak": 3_400_000} for event in memory_events(1)], "ring", 1)
        bars = [bar.x[0] for bar in figures.memory_kinds([trace]).data if bar.type == "bar"]
        assert bars == [800_000, 800_000, 1_600_000, 100_000, 0, 100_000]

    def test_activations_that_hide_the_states_run_off_the_figure(self):
        many = [trace_of(memory_events(1, shards=n, activations=9_000_000), f"run {n}", 1) for n in (1, 2)]
        figure = figures.memory_kinds(many)
        assert figure.layout.xaxis.range == (0, 6_400_000)
        assert all(text.endswith("→ ") for text in figure.data[-1].text)
        few = [trace_of(memory_events(1, shards=n), f"run {n}", 1) for n in (1, 2)]
        assert figures.memory_kinds(few).layout.xaxis.range[1] > 3_600_000

    def test_predictions_are_drawn_like_runs_and_end_at_their_peak(self):
        job = Job(model="mlp", data="digits", world_size=4, strategy="ring")
        predicted = [ss.predict(job), ss.predict(job.replace(strategy="zero-3"))]
        info = _memory_kinds.memory_kinds_info(predicted)
        assert [run.label for run in info.runs] == ["ring", "zero-3"]
        assert [run.most for run in info.runs] == [each.held_bytes for each in predicted]
        assert _memory_kinds.states_text(info).startswith(
            "zero-3 holds a quarter of the model states of ring: "
        )

    def test_predictions_of_one_strategy_are_named_by_what_differs(self):
        job = Job(model="mlp", data="digits", world_size=2, strategy="ring")
        predicted = [ss.predict(job), ss.predict(job.replace(model="gpt-nano", data="python-source"))]
        info = _memory_kinds.memory_kinds_info(predicted)
        assert ["mlp" in run.label for run in info.runs] == [True, False]
        assert info.runs[0].label in _memory_kinds.states_text(info)


class TestLinks:
    def test_each_rank_is_one_bar_of_what_it_sent_and_received(self):
        trace = Trace.read(fake_run("ring", 2, steps=2))
        (run,) = _links.links_info([trace, Trace.read(fake_run("single", steps=2))]).runs
        assert run.bars == (StackBar("rank 0", (800_000, 800_000)), StackBar("rank 1", (800_000, 800_000)))

    def test_the_busiest_link_is_named(self):
        trace = Trace("id", "parameter-server", "parameter-server", world_size=2)
        trace.links = {0: Moved(300, 300), 1: Moved(100, 100)}
        assert _links.links_text(_links.links_info([trace])) == (
            "parameter-server: the busiest link (rank 0) carries 600 B per step, 1.5 times the mean of 2 ranks."
        )
        assert figures.links([trace]).data


class TestGantt:
    def test_the_ideal_of_several_passes_is_that_of_each(self):
        twice = Pipeline(schedule="gpipe", microbatches=4)
        job = Job(model="mlp", data="digits", strategy=twice, batch=Batch(8, micro_batch=1))
        trace = Trace.of(SimpleNamespace(id="id", name="run", job=job))
        once = schedule_events(2, 4)
        length = max(op[4] for event in once for op in event["ops"]) - min(
            op[3] for event in once for op in event["ops"]
        )
        for event in once:
            again = [[op, stage, part + 4, a + length, b + length] for op, stage, part, a, b in event["ops"]]
            trace.feed([event | {"ops": [*event["ops"], *again]}])
        info = _pipeline.gantt_info(trace)
        assert info.ideal == pytest.approx(1 / 5)
        assert info.bubble == pytest.approx(info.ideal, abs=1e-4)

    def test_thousands_of_operations_are_drawn_in_a_moment(self):
        trace = trace_of(schedule_events(8, 512), world_size=8, schedule="gpipe")

        def took_s():
            started = time.thread_time()
            assert len(_pipeline.gantt_info(trace).ops) == 8192
            return time.thread_time() - started

        assert any(took_s() < 0.5 for _ in range(20))

    @pytest.mark.parametrize(("stages", "parts"), [(2, 4), (4, 8), (3, 1)])
    def test_the_bubble_of_equal_stages_is_the_formulas(self, stages, parts):
        trace = trace_of(schedule_events(stages, parts), world_size=stages, schedule="gpipe")
        info = _pipeline.gantt_info(trace)
        assert info.bubble == pytest.approx((stages - 1) / (parts + stages - 1), abs=1e-4)
        assert info.ideal == pytest.approx(info.bubble, abs=1e-4)
        assert (info.num_stages, info.num_micro_batches) == (stages, parts)

    def test_a_formula_is_only_named_where_there_is_one(self):
        trace = trace_of(schedule_events(2, 2, split=True), schedule="zb")
        info = _pipeline.gantt_info(trace)
        assert info.ideal is None
        assert {op.op for op in info.ops} == {"F", "I", "W"}

    def test_one_step_is_named_beside_the_medians_of_all(self):
        steps = [event for step in range(1, 6) for event in schedule_events(2, 4, step=step)]
        slow = [
            event | {"ops": [[*op, start, end + (end - start)] for *op, start, end in event["ops"]]}
            for event in schedule_events(2, 4, step=6)
        ]
        info = _pipeline.gantt_info(trace_of(steps + slow, schedule="gpipe"))
        text = _pipeline.gantt_text(info)
        assert "step 6: 4 micro-batches" in text
        assert "(medians over all steps: 150 ms, 20%)" in text
        title = _pipeline.draw_gantt(info._replace(bubble=0.41)).layout.annotations[0].text
        assert title.startswith("<b>gpipe</b><br>")
        assert "step 6: waiting 20% (this step 41%), bubble 20%" in title

    def test_stages_of_one_rank_are_told_apart_by_shade(self):
        trace = trace_of(schedule_events(2, 2, virtual=2), schedule="interleaved")
        info = _pipeline.gantt_info(trace)
        assert {(op.rank, op.stage, op.turn) for op in info.ops} == {
            (0, 0, 0),
            (0, 2, 1),
            (1, 1, 0),
            (1, 3, 1),
        }
        drawn = figures.gantt(trace)
        assert len({bar.marker.color for bar in drawn.data}) == len(drawn.data) == 4

    def test_a_step_that_a_rank_has_not_told_yet_is_not_shown(self):
        trace = trace_of(schedule_events(2, 2, step=1) + schedule_events(2, 2, step=2)[:1])
        assert _pipeline.gantt_info(trace).step == 1

    def test_the_micro_batches_are_numbered_in_the_bars(self):
        drawn = figures.gantt(trace_of(schedule_events(2, 3)))
        assert drawn.data[0].text == ("0", "1", "0", "2", "1", "2")
        assert drawn.layout.uniformtext.mode == "hide"

    def test_it_is_also_there_in_words(self):
        info = _pipeline.gantt_info(trace_of(schedule_events(2, 4), schedule="gpipe"))
        assert _pipeline.gantt_text(info) == (
            "pipeline, step 1: 4 micro-batches through 2 stages on 2 ranks take 150 ms. Ranks wait for 20% of this "
            "time. The bubble would be 20% with stages of equal cost and backward passes twice as long as forward "
            "passes."
        )
        assert "No schedule" in _pipeline.gantt_text(
            _pipeline.gantt_info(Trace("id", "run", "pipeline", world_size=2))
        )


class TestStaleness:
    def test_gradients_are_counted_by_how_far_behind_they_were(self):
        info = _staleness.staleness_info(trace_of(update_events([[0, 2], [1], [2]]), bound=2.0))
        assert info.counts == ((0, 1), (1, 1), (2, 2))
        assert info.over_time == ((0.0, 2), (0.01, 1), (0.02, 2))
        assert _staleness.staleness_text(info) == (
            "pipeline: the server applied 4 gradients in 3 updates. They were 1.2 updates stale on average and 2 at "
            "most, with a bound of 2."
        )

    def test_the_bound_is_a_line_in_both_halves_and_none_where_there_is_none(self):
        events = update_events([[0], [3]])
        assert len(figures.staleness(trace_of(events, bound=3.0)).layout.shapes) == 2
        assert figures.staleness(trace_of(events)).layout.shapes == ()
        assert "with no bound" in _staleness.staleness_text(_staleness.staleness_info(trace_of(events)))

    def test_a_synchronous_server_has_nothing_to_tell(self):
        events = update_events([[0, 0]])
        assert not _staleness.staleness_info(trace_of(events, bound=0.0)).is_telling
        assert _staleness.staleness_info(trace_of(events, bound=1.0)).is_telling
        assert not _staleness.staleness_info(trace_of([])).is_telling

    def test_a_long_run_is_thinned_to_the_stalest(self):
        values = [[0]] * 5000
        values[777] = [9]
        info = _staleness.staleness_info(trace_of(update_events(values)))
        assert len(info.over_time) <= MOST_POINTS
        assert max(value for _, value in info.over_time) == 9


class TestConsensus:
    def test_the_distance_is_one_value_a_step_and_zero_leaves_a_gap(self):
        trace = trace_of(consensus_events([0.1, 0.01, 0.0]), "gossip")
        (curve,) = _consensus.consensus_info([trace, Trace("id", "ring", "ring", world_size=2)]).curves
        assert (curve.steps, curve.values) == ((1, 2, 3), (0.1, 0.01, None))
        assert "at most 1.0e-01 of its norm" in _consensus.consensus_text(_consensus.consensus_info([trace]))

    def test_the_axis_is_logarithmic(self):
        assert figures.consensus([trace_of(consensus_events([0.1]), "gossip")]).layout.yaxis.type == "log"


class TestColours:
    def test_ink_contrasts_with_every_operation_in_every_shade(self):
        for look in theme.OP_LOOKS.values():
            for part in (0, 0.25, 0.5, 0.75):
                colour = theme.tint(look.colour, part)
                assert contrast(colour, theme.ink_on(colour)) >= 4.5, colour

    def test_every_strategy_has_a_look_of_its_own(self):
        from shardscope.spec.strategy import strategies

        layer_samples = [
            theme.run_looks([Trace("id", "run", kind, world_size=2)])[0] for kind in strategies()
        ]
        assert len({look.colour for look in layer_samples}) == len(layer_samples)


def contrast(one: str, other: str) -> float:
    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)
