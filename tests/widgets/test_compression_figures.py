"""What compression saved and cost, from made-up runs; below which bandwidth it pays, from made-up worths."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

import shardscope as ss
from shardscope.analytic.communication.worth import Exchange
from shardscope.measure.break_even import BreakEven, MethodWorth
from shardscope_widgets import figures
from shardscope_widgets.figures._compression import CompressedRun, step_parts
from shardscope_widgets.trace import Trace


def trace(method: str, sent: int, *, codec_s: float = 0.0, wait_s: float = 0.2, steps: int = 6) -> Trace:
    """A run of two ranks: each step computes for 0.1 s, packs (a tenth of it behind computing), and waits."""
    compression = SimpleNamespace(name=method, label=method)
    strategy = SimpleNamespace(kind="ring", label="ring")
    job = SimpleNamespace(
        model="mlp", data="digits", strategy=strategy, world_size=2, compression=compression
    )
    made = Trace.of(SimpleNamespace(id=method, name=f"ring-{method}-mlp", job=job))
    for step in range(1, steps + 1):
        start = 10.0 * step
        packed = (
            [["codec", "encode", start + 0.1 - 0.1 * codec_s, start + 0.1 + 0.9 * codec_s, 0]]
            if codec_s
            else []
        )
        for rank in (0, 1):
            made.feed([{
                "event": "step", "step": step, "rank": rank, "loss": 2.0 / step, "samples": 4, "tokens": None,
                "step_time_s": 0.1 + 0.9 * codec_s + wait_s, "peak_memory_bytes": 1,
                "traffic": {"x": {"sent_bytes": sent, "received_bytes": sent}},
                "spans": [["compute", "forward", start, start + 0.1, 0], *packed],
            }])  # fmt: skip
            if method != "none":
                owed = {"residual_norm": step + rank, "notes": [1]}
                made.feed([{"event": "compression", "step": step, "rank": rank, "figures": owed}])
    return made


def test_a_steps_parts_are_computing_packing_that_it_does_not_hide_and_the_rest() -> None:
    assert step_parts(trace("int8", 100, codec_s=0.04)) == pytest.approx((0.1, 0.036, 0.2))
    assert step_parts(trace("none", 400)) == pytest.approx((0.1, 0.0, 0.2))


def test_compressed_runs_stand_after_the_uncompressed_one_and_are_held_against_it() -> None:
    info = figures.compression_info([trace("int8", 100, codec_s=0.04, wait_s=0.05), trace("none", 400)])
    plain, packed = info.runs
    assert (plain.method, packed.method) == ("none", "int8")
    assert packed.ratio == pytest.approx(4)
    assert packed.owed == tuple((step, step + 1.0) for step in range(1, 7)), "the largest rank's residual"
    assert info.is_telling
    text = figures.compression_text(info)
    assert "ring-int8-mlp sends 200 B a step, 4 times less than uncompressed, packs for 36 ms" in text
    assert "takes 186 ms instead of 300 ms a step" in text


def test_the_figure_has_bars_for_bytes_and_parts_and_a_line_for_what_is_owed() -> None:
    info = figures.compression_info([trace("none", 400), trace("int8", 100, codec_s=0.04)])
    figure = figures.draw_compression(info)
    assert [t.type for t in figure.data] == ["bar"] * 4 + ["scatter"]
    assert list(figure.data[0].y) == [800, 200]
    assert list(figure.data[0].text) == ["", "4 ×"]
    assert len(set(figure.data[0].x)) == 2


def test_without_a_compressed_run_there_is_nothing_to_tell() -> None:
    info = figures.compression_info([trace("none", 400)])
    assert not info.is_telling
    assert figures.compression_text(info) == "No run is compressed."


def found(bandwidths: tuple[float, float]) -> BreakEven:
    """One method that sends a tenth."""
    plain = (Exchange(1e6, 2), Exchange(1.5e6, 6))
    packed = (Exchange(1e5, 2, 0.01), Exchange(1.5e5, 2, 0.02))
    return BreakEven(
        "mlp", 250_000, (2, 4), 0.0, plain, (MethodWorth(ss.Compression("topk"), packed, bandwidths),)
    )


def test_a_line_a_method_in_bits_a_second_and_none_where_it_never_pays() -> None:
    info = figures.break_even_info(found((9e7, 0.0)), here=(2, 12.5e6))
    assert info.lines[0].bits_per_s == (pytest.approx(7.2e8), None)
    assert info.here == (2, 1e8)
    assert figures.break_even_text(info).endswith("Never: topk.")
    assert "10 times less; packs and unpacks for 10 ms" in info.lines[0].hover[0]


def test_what_always_pays_is_said_in_words_and_drawn_at_the_edge() -> None:
    info = figures.break_even_info(found((9e7, math.inf)))
    assert "pays with topk on any link" in figures.break_even_text(info)
    figure = figures.break_even(found((9e7, math.inf)))
    assert figure.data[0].y[1] > figure.data[0].y[0]


def test_runs_with_the_same_method_keep_bars_of_their_own() -> None:
    info = figures.compression_info([trace("none", 400), trace("int8", 100), trace("int8", 100)])
    assert len({*figures.draw_compression(info).data[0].x}) == 3
    assert isinstance(info.runs[0], CompressedRun)
