"""What compression saved and cost, from made-up runs; below which bandwidth it pays, from a made-up prediction."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from conformance.events import step_event, traffic
from shardscope.measure.compression.curve import MeasuredStep, PredictedStep, Worth
from shardscope.spec import Compression, Job, Link
from shardscope_widgets import figures
from shardscope_widgets.figures import _compression, _compression_speedup
from shardscope_widgets.figures._comparison import comparison_info
from shardscope_widgets.figures._compression import CompressedRun, step_parts
from shardscope_widgets.trace import Trace


def trace(
    method: str,
    sent: int,
    *,
    codec_s: float = 0.0,
    wait_s: float = 0.2,
    steps: int = 6,
    strategy: str = "ring",
    every: int = 1,
    spans: bool = True,
    link: str = "",
) -> Trace:
    """A run of two ranks: each step computes for 0.1 s, packs (a tenth of it behind computing), and waits. One step in
    `every` sends and waits."""
    period = {"every": every} if every > 1 else {}
    job = Job(
        model="mlp", data="digits", strategy=strategy, steps=steps, compression=Compression(method, **period),
        link=Link(bandwidth=link, latency="0 s", name=link) if link else None,
    )  # fmt: skip
    made = Trace.of(SimpleNamespace(id=method, name=f"{strategy}-{method}-mlp", job=job))
    made.label, made.link = f"{strategy}-{method}-mlp run", link
    for step in range(1, steps + 1):
        start = 10.0 * step
        packed = (
            [["codec", "encode", start + 0.1 - 0.1 * codec_s, start + 0.1 + 0.9 * codec_s, 0]]
            if codec_s
            else []
        )
        talks = step % every == 0
        told = [["compute", "forward", start, start + 0.1, 0], *packed] if spans else []
        size = sent if talks else 0
        for rank in (0, 1):
            seconds = 0.1 + 0.9 * codec_s + wait_s * talks
            made.feed(
                [
                    step_event(
                        step, rank, loss=2.0 / step, step_time_s=seconds, traffic=traffic(size), spans=told
                    )
                ]
            )
            if method != "none":
                residuals = {"residual_norm": step + rank, "notes": [1]}
                made.feed(
                    [{"event": "compression", "t": start, "step": step, "rank": rank, "figures": residuals}]
                )
    return made


def test_a_steps_parts_are_computing_packing_that_it_does_not_hide_and_the_rest() -> None:
    assert step_parts(trace("int8", 100, codec_s=0.04)) == pytest.approx((0.1, 0.036, 0.2))
    assert step_parts(trace("none", 400)) == pytest.approx((0.1, 0.0, 0.2))


def test_compressed_runs_stand_after_the_uncompressed_one_and_are_held_against_it() -> None:
    info = _compression.compression_info([trace("int8", 100, codec_s=0.04, wait_s=0.05), trace("none", 400)])
    plain, packed = info.runs
    assert (plain.method, packed.method) == ("none", "int8")
    assert packed.ratio == pytest.approx(4)
    assert packed.residuals == tuple((step, step + 1.0) for step in range(1, 7)), (
        "the largest rank's residual"
    )
    assert info.is_telling
    text = _compression.compression_text(info)
    assert (
        "ring-int8-mlp run sends 200 B per step over all ranks, 4 times less than uncompressed and spends 36 ms per "
        "step on compression" in text
    )
    assert "A step takes 186 ms instead of 300 ms." in text


def test_the_figure_has_bars_for_bytes_and_parts_and_a_line_for_what_is_owed() -> None:
    info = _compression.compression_info([trace("none", 400), trace("int8", 100, codec_s=0.04)])
    figure = _compression.draw_compression(info)
    assert [t.type for t in figure.data] == ["bar"] * 4 + ["scatter"]
    assert list(figure.data[0].y) == [800, 200]
    assert list(figure.data[0].text) == ["", "4 ×"]
    assert len(set(figure.data[0].x)) == 2


def test_without_a_compressed_run_there_is_nothing_to_tell() -> None:
    info = _compression.compression_info([trace("none", 400)])
    assert not info.is_telling
    assert _compression.compression_text(info) == "No run is compressed."


def test_steps_that_talk_now_and_then_are_averaged_over_their_periods() -> None:
    seldom = trace("local-sgd", 400, steps=13, every=4)
    info = _compression.compression_info([trace("none", 400), seldom])
    assert info.runs[1].bytes_per_step == 200
    assert info.runs[1].ratio == 4
    assert info.runs[1].parts == pytest.approx((0.1, 0.0, 0.05))
    text = _compression.compression_text(info)
    assert (
        "sends 200 B per step over all ranks, 4 times less than uncompressed and compresses nothing" in text
    )
    assert "A step takes 150 ms instead of 300 ms." in text
    (row,) = comparison_info([seldom])
    assert (row.bytes_per_step, row.step_time_s) == (200, pytest.approx(0.15))
    assert row.per_second == pytest.approx(8 / 0.15)


def test_before_its_first_period_is_over_a_run_says_so() -> None:
    info = _compression.compression_info([trace("none", 400), trace("local-sgd", 400, steps=3, every=4)])
    assert (info.runs[1].bytes_per_step, info.runs[1].ratio, info.runs[1].parts) == (None, None, None)
    assert "has not finished its first period of local SGD" in _compression.compression_text(info)
    assert _compression.draw_compression(info).data[0].y[1] is None


def test_each_run_is_held_against_the_uncompressed_one_of_its_own_strategy_and_ranks() -> None:
    ring, other = trace("none", 400), trace("none", 900, strategy="parameter-server", wait_s=0.5)
    packed = trace("int8", 100, strategy="parameter-server")
    info = _compression.compression_info([ring, packed, other])
    assert [run.label for run in info.runs] == [other.label, packed.label], "the ring is nobody's measure"
    assert info.runs[1].ratio == 9
    assert "A step takes 300 ms instead of 600 ms." in _compression.compression_text(info)
    assert _compression.compression_info([ring, packed]).runs[0].ratio is None
    assert "instead of" not in _compression.compression_text(_compression.compression_info([ring, packed]))


def test_times_are_compared_on_one_link_only_and_bytes_on_any() -> None:
    fast, slow = trace("none", 400), trace("none", 400, wait_s=0.9, link="100 Mbit/s")
    packed = trace("int8", 100, link="100 Mbit/s")
    alone = _compression.compression_text(_compression.compression_info([fast, packed]))
    assert "4 times less than uncompressed" in alone
    assert "instead of" not in alone
    both = _compression.compression_info([fast, packed, slow])
    assert "A step takes 300 ms instead of 1 s." in _compression.compression_text(both)
    assert [run.link for run in both.runs] == ["100 Mbit/s", "100 Mbit/s"], (
        "the unpaced run is nobody's measure"
    )
    apart = _compression.draw_compression(_compression.compression_info([fast, packed]))
    assert apart.data[0].x == ("none", "int8"), "links are told only where labels would be the same"
    mixed = _compression.compression_info([fast, slow, packed, trace("int4", 50)])
    assert _compression.draw_compression(mixed).data[0].x == (
        "no<br>link<br>none", "100<br>Mbit/s<br>none", "100<br>Mbit/s<br>int8", "no<br>link<br>int4",
    )  # fmt: skip


def test_without_spans_the_parts_of_a_step_are_not_measured() -> None:
    info = _compression.compression_info([trace("none", 400, spans=False), trace("int8", 100, spans=False)])
    assert [run.parts for run in info.runs] == [None, None]
    assert "has no measured compression time" in _compression.compression_text(info)
    assert "takes 300 ms instead of 300 ms" in _compression.compression_text(info)
    whole = _compression.draw_compression(info).data[4]
    assert (whole.name, list(whole.y)) == ("parts not measured", pytest.approx([0.3, 0.3]))


def test_bars_of_bytes_start_at_zero_and_an_empty_plot_says_why() -> None:
    layout = _compression.draw_compression(
        _compression.compression_info([trace("none", 400), trace("int8", 100)])
    ).layout
    assert (layout.yaxis.type, layout.yaxis.rangemode) == (None, "tozero")
    assert layout.xaxis3.visible
    forgetful = trace("bf16", 200)
    forgetful.kept.clear()
    layout = _compression.draw_compression(_compression.compression_info([forgetful])).layout
    assert not layout.xaxis3.visible
    assert "no run has" in layout.annotations[-1].text


def test_each_line_of_the_residuals_is_in_the_legend() -> None:
    figure = _compression.draw_compression(
        _compression.compression_info([trace("none", 400), trace("int8", 100)])
    )
    assert [line.name for line in figure.data if line.type == "scatter" and line.showlegend] == ["int8"]


def test_a_loss_curve_can_have_the_colour_of_its_method() -> None:
    runs = [trace("none", 400), trace("int8", 100), trace("topk", 10)]
    colours = [line.line.color for line in figures.loss(runs, by_method=True).data if line.showlegend]
    assert colours == list(figures.compression(runs).data[0].marker.color)


def test_the_parts_of_a_step_add_up_to_the_time_in_the_text() -> None:
    """One slow step changes neither the bars nor the text."""
    slow = trace("int8", 100, codec_s=0.04, steps=9)
    for rank in (0, 1):
        spans = [["compute", "forward", 200.0, 200.1, 0], ["codec", "encode", 200.1, 200.9, 0]]
        slow.feed([step_event(10, rank, loss=0.2, step_time_s=3.0, traffic=traffic(100), spans=spans)])
    (run,) = _compression.compression_info([slow]).runs
    assert run.parts == pytest.approx((0.1, 0.036, 0.2))
    assert sum(run.parts) == pytest.approx(run.step_s)


def test_runs_with_the_same_method_keep_bars_of_their_own() -> None:
    info = _compression.compression_info([trace("none", 400), trace("int8", 100), trace("int8", 100)])
    assert len({*_compression.draw_compression(info).data[0].x}) == 3
    assert isinstance(info.runs[0], CompressedRun)


def worth(*steps: tuple[str, float, float], link: str = "8 Mbit/s") -> Worth:
    """Steps of (method, bytes, seconds without sending), on a link."""
    made = [PredictedStep(Compression(name), sent, rest_s, 0.0, sent / 1e6) for name, sent, rest_s in steps]
    return Worth(Link(bandwidth="8 Mbit/s", latency="1 ms"), tuple(made)).at(link)


USUAL = (("none", 1e6, 0.1), ("int4", 1e5, 0.15), ("topk", 1e4, 0.1))


def test_lines_marks_and_texts_have_the_threshold_of_the_result() -> None:
    found = worth(*USUAL)
    info = figures.info(figures.compression_speedup, found)
    assert found.threshold is not None
    assert (info.threshold, info.crossing) == found.threshold[1:]
    assert [line.label for line in info.lines] == ["uncompressed", "int4", "topk"]
    assert [line.refusal for line in info.lines] == ["", "", "loss 19% higher than uncompressed with AdamW"]
    assert found.limit in figures.caption(figures.compression_speedup, found)
    figure = figures.compression_speedup(found)
    names = [line.name for line in figure.data if line.showlegend is not False]
    assert names == ["uncompressed", "int4, below 97.7 Mbit/s", "loss too high"]
    crossing = next(
        each for each in figure.data if each.mode == "markers+text" and each.marker.symbol == "circle"
    )
    assert list(crossing.x) == pytest.approx([8 * found.threshold.crossing])
    assert crossing.text == ("144 Mbit/s",)
    assert {"<b>pays off below<br>97.7 Mbit/s</b>", "gain below the<br>prediction error", "my link"} == {
        note.text for note in figure.layout.annotations
    }
    grey = next(each for each in figure.data if each.name == "loss too high")
    assert "topk" in grey.text
    assert grey.line.color == _compression_speedup.theme.GREY
    assert grey.opacity < 1


def test_a_crossing_far_away_is_named_at_the_edge() -> None:
    figure = figures.compression_speedup(worth(("none", 1e6, 0.1), ("int4", 1e5, 0.1 + 1e-6)))
    assert figure.layout.annotations[1].text == "gain below the<br>prediction error"
    assert "equal at 7.2 Tbit/s →" in {note.text for note in figure.layout.annotations}


def test_a_method_that_saves_messages_but_not_bytes_has_a_mark_where_it_begins_to_gain() -> None:
    found = worth(*USUAL[:2], ("bf16", 2e6, 0.05))
    figure = figures.compression_speedup(found)
    crossings = next(each for each in figure.data if each.marker.symbol == "circle")
    assert list(crossings.x) == pytest.approx(
        [8 * found.crossing(found.steps[1]), 8 * found.pays_above(found.steps[2], margin=1.0)]
    )
    at = found.at(found.pays_above(found.steps[2], margin=1.0))
    assert at.steps[0].step_s == pytest.approx(at.steps[2].step_s)


def test_names_of_lines_and_measurements_do_not_cover_each_other() -> None:
    alike = (("topk", 1e4, 0.1), ("dgc", 1e4, 0.101), ("randomblock", 1.07e4, 0.107))
    ran = [
        MeasuredStep(Compression(name), 1.25e7, seconds)
        for name, seconds in (("none", 0.2), ("int4", 0.201), ("int8", 0.6))
    ]
    figure = figures.compression_speedup(replace(worth(*USUAL[:2], *alike), measured=tuple(ran)))
    refused = [each for each in figure.data if each.legendgroup == "refused"]
    named = [(text, at) for line in refused for at, text in enumerate(line.text) if text]
    assert {text for text, _ in named} == {"topk, dgc", "randomblock"}
    assert len({at for _, at in named}) == 2
    labels = [(each.text[0], each.textposition) for each in figure.data if each.name == "measured"]
    assert labels == [("", "middle right"), ("uncompressed, int4", "middle left"), ("int8", "middle right")]


def test_both_lines_meet_at_the_crossing() -> None:
    found = worth(*USUAL)
    at = found.at(found.crossing(found.steps[1]))
    assert at.steps[0].step_s == pytest.approx(at.steps[1].step_s)


def test_the_slider_moves_my_link_and_says_what_a_step_takes_there() -> None:
    figure = figures.compression_speedup(worth(*USUAL, link="40 Mbit/s"))
    (slider,) = figure.layout.sliders
    here = slider.steps[slider.active]
    assert here.label == "40 Mbit/s:<br>170 ms with int4 instead of 300 ms (76% faster)"
    assert figure.layout.shapes[0].x0 == here.args[0]["shapes[0].x0"] == pytest.approx(40e6)
    assert figure.layout.annotations[0].text == "my link"
    assert slider.steps[-1].label.endswith("114 ms per step, uncompressed")
    near = next(step.label for step in slider.steps if "below the prediction error" in step.label)
    assert "% faster with int4, below the prediction error (15%)" in near
    info = _compression_speedup.compression_speedup_info(worth(*USUAL), slides=False)
    assert not _compression_speedup.speedup_layout(info)["sliders"]


def test_measured_steps_are_marked_at_their_bandwidth() -> None:
    ran = [
        MeasuredStep(Compression(name), 1.25e7, seconds) for name, seconds in (("none", 0.2), ("int4", 0.3))
    ]
    found = replace(worth(*USUAL), measured=tuple(ran))
    figure = figures.compression_speedup(found)
    marks = [each for each in figure.data if each.name == "measured"]
    assert [(each.x, each.y) for each in marks] == [((1e8,), (0.2,)), ((1e8,), (0.3,))]
    assert [each.showlegend for each in marks] == [True, False]
    assert "300 ms with int4 (50% slower;" in figures.caption(figures.compression_speedup, found)


@pytest.mark.parametrize(
    "steps",
    [
        (("none", 1e6, 0.1),),
        (("none", 1e6, 0.1), ("bf16", 5e5, 0.1)),
        (("none", 1e6, 0.1), ("bf16", 2e6, 0.1)),
    ],
)
def test_without_a_crossing_there_is_a_figure_all_the_same(steps: tuple) -> None:
    figure = figures.compression_speedup(worth(*steps))
    assert figure.layout.annotations[0].text == "my link"
    gains_little_above = steps[-1][1] < 1e6
    is_marked = "gain below the<br>prediction error" in {note.text for note in figure.layout.annotations}
    assert is_marked is gains_little_above
