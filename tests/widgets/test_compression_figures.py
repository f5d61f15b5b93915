"""What compression saved and cost, from made-up runs; below which bandwidth it pays, from made-up worths."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

import shardscope as ss
from conformance.events import step_event, traffic
from shardscope.analytic.communication.exchange import ExchangeCost
from shardscope.measure.compression.break_even import BreakEven, MethodWorth
from shardscope.spec import Compression, Job, Link
from shardscope_widgets import figures
from shardscope_widgets.figures import _break_even, _compression
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
        "ring-int8-mlp run sends 200 B per step (all ranks), 4 times less than uncompressed, packs for 36 ms"
        in text
    )
    assert "takes 186 ms instead of 300 ms per step" in text


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
    assert "sends 200 B per step (all ranks), 4 times less than uncompressed, packs nothing" in text
    assert "takes 150 ms instead of 300 ms per step" in text
    (row,) = comparison_info([seldom])
    assert (row.bytes_per_step, row.step_time_s) == (200, pytest.approx(0.15))
    assert row.per_second == pytest.approx(8 / 0.15)


def test_before_its_first_period_is_over_a_run_says_so() -> None:
    info = _compression.compression_info([trace("none", 400), trace("local-sgd", 400, steps=3, every=4)])
    assert (info.runs[1].bytes_per_step, info.runs[1].ratio, info.runs[1].parts) == (None, None, None)
    assert "has not finished its first local-SGD period" in _compression.compression_text(info)
    assert _compression.draw_compression(info).data[0].y[1] is None


def test_each_run_is_held_against_the_uncompressed_one_of_its_own_strategy_and_ranks() -> None:
    ring, other = trace("none", 400), trace("none", 900, strategy="parameter-server", wait_s=0.5)
    packed = trace("int8", 100, strategy="parameter-server")
    info = _compression.compression_info([ring, packed, other])
    assert [run.label for run in info.runs] == [other.label, packed.label], "the ring is nobody's measure"
    assert info.runs[1].ratio == 9
    assert "takes 300 ms instead of 600 ms per step" in _compression.compression_text(info)
    assert _compression.compression_info([ring, packed]).runs[0].ratio is None
    assert "instead of" not in _compression.compression_text(_compression.compression_info([ring, packed]))


def test_times_are_compared_on_one_link_only_and_bytes_on_any() -> None:
    fast, slow = trace("none", 400), trace("none", 400, wait_s=0.9, link="100 Mbit/s")
    packed = trace("int8", 100, link="100 Mbit/s")
    alone = _compression.compression_text(_compression.compression_info([fast, packed]))
    assert "4 times less than uncompressed" in alone
    assert "instead of" not in alone
    both = _compression.compression_info([fast, packed, slow])
    assert "takes 300 ms instead of 1 s per step" in _compression.compression_text(both)
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
    assert "has no measured packing time" in _compression.compression_text(info)
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
    assert "no run carries" in layout.annotations[-1].text


def found(bandwidths: tuple[float, float], variation: float = 1.0) -> BreakEven:
    """One method that sends a tenth; with the median packing time it pays off below half the bandwidth."""
    plain = (ExchangeCost(1e6, 2), ExchangeCost(1.5e6, 6))
    packed = (ExchangeCost(1e5, 2, 0.01), ExchangeCost(1.5e5, 2, 0.02))
    low = (bandwidths[0] / 2, bandwidths[1] / 2)
    worth = MethodWorth(ss.Compression("topk"), packed, bandwidths, low, variation)
    return BreakEven("mlp", 250_000, (2, 4), 0.0, plain, (worth,), 2, "adamw")


def test_a_line_a_method_in_bits_a_second_and_none_where_it_never_pays() -> None:
    info = _break_even.break_even_info(found((9e7, 0.0)), here=(2, "100 Mbit/s"))
    assert info.lines[0].bits_per_s == (pytest.approx(7.2e8), None)
    assert info.lines[0].low_bits_per_s == (pytest.approx(3.6e8), None)
    assert info.here == (2, 1e8)
    assert (
        "below 720 Mbit/s; each worker sends 100 kB, 10 times less; packing and unpacking take 10 ms"
        in info.lines[0].hover[0]
    )


def test_the_text_begins_with_the_jobs_own_workers_and_compares_exchanges_only() -> None:
    assert _break_even.break_even_text(_break_even.break_even_info(found((9e7, 0.0)))) == (
        "Among **2 workers**, exchanging mlp's gradients is faster compressed below 720 Mbit/s with topk. Among 4: "
        "never with topk. Exchange only: a whole step also computes, and gains less."
    )


def test_on_a_marked_link_the_largest_gain_comes_first() -> None:
    small, large = (ExchangeCost(sent, 2, codec_s) for sent, codec_s in ((1e5, 0.02), (5e5, 0.001)))
    methods = [
        MethodWorth(ss.Compression(name), (packed,), (level,), (level,))
        for name, packed, level in (("bf16", large, 5e8), ("int4", small, 4.5e7), ("qsgd", large, 0.0))
    ]
    both = BreakEven("mlp", 250_000, (2,), 0.0, (ExchangeCost(1e6, 2),), tuple(methods), 2, "adamw")
    info = _break_even.break_even_info(both, here=(2, "8 Mbit/s"))
    assert [line.label for line in info.lines] == ["int4", "bf16", "qsgd"]
    text = _break_even.break_even_text(info)
    assert (
        "at 8 Mbit/s, largest gain first: 8.33 times with int4 (below 360 Mbit/s) and 2 times with bf16"
        in text
    )
    assert "; never with qsgd." in text
    assert [line.label for line in _break_even.break_even_info(both).lines] == ["bf16", "int4", "qsgd"]


def test_lines_that_always_pay_are_drawn_beside_one_another() -> None:
    worths = [
        MethodWorth(
            ss.Compression(name),
            (ExchangeCost(1e5, 2), ExchangeCost(1e5, 2)),
            (1e7, math.inf),
            (1e7, math.inf),
        )
        for name in ("int4", "int8", "topk")
    ]
    plain = (ExchangeCost(1e6, 2), ExchangeCost(1.5e6, 6))
    figure = figures.break_even(BreakEven("mlp", 250_000, (2, 4), 0.0, plain, tuple(worths), 2, "adamw"))
    assert len({trace.y[1] for trace in figure.data}) == 3
    assert max(trace.y[1] for trace in figure.data) < 10 ** figure.layout.yaxis.range[1]


def test_each_line_of_the_residuals_is_in_the_legend() -> None:
    figure = _compression.draw_compression(
        _compression.compression_info([trace("none", 400), trace("int8", 100)])
    )
    assert [line.name for line in figure.data if line.type == "scatter" and line.showlegend] == ["int8"]


def test_where_packing_times_vary_the_text_says_so() -> None:
    busy = _break_even.break_even_text(_break_even.break_even_info(found((9e7, 1e7), variation=2.34)))
    assert "Packing times varied by 2.3 times: the machine is busy, run again." in busy
    assert "busy" not in _break_even.break_even_text(
        _break_even.break_even_info(found((9e7, 1e7), variation=1.4))
    )


def test_what_always_pays_is_said_in_words_and_drawn_at_the_top() -> None:
    info = _break_even.break_even_info(found((9e7, math.inf)))
    assert "on any link with topk (fewer messages in sequence)" in _break_even.break_even_text(info)
    figure = figures.break_even(found((9e7, math.inf)))
    ticks = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "any link")
    assert figure.layout.yaxis.ticktext == ticks
    assert figure.data[0].y[1] == figure.layout.yaxis.tickvals[-1]
    assert figure.data[0].error_y.arrayminus[0] == pytest.approx(3.6e8)
    assert "250 k parameters" in figure.layout.annotations[1].text


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
