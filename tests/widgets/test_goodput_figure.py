"""Expected goodput over the interval between checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

from shardscope.analytic import reliability
from shardscope_widgets import figures
from shardscope_widgets.figures import _goodput

TIMES = {"mtbf_s": 3600.0, "save_s": 20.0, "restart_s": 300.0}


def test_the_curve_is_that_of_the_formula_and_highest_at_the_marked_interval():
    info = _goodput.goodput_info(**TIMES)
    expected = reliability.expected(**TIMES, interval_s=np.array(info.intervals_s))
    assert info.goodputs == pytest.approx(tuple(expected.goodput))
    assert max(info.goodputs) == pytest.approx(info.best, rel=1e-3)
    assert info.intervals_s[0] < info.daly_s < info.young_s < info.intervals_s[-1]


def test_measured_runs_are_drawn_with_short_labels_that_do_not_meet():
    measured = [
        figures.MeasuredGoodput("every 2 steps", 2.0, 0.5, "3 steps lost"),
        figures.MeasuredGoodput("every 3 steps", 3.0, 0.5),
    ]
    info = _goodput.goodput_info(**TIMES, measured=measured)
    assert info.intervals_s[0] <= 2.0
    assert [trace.name for trace in _goodput.draw_goodput(info).data] == [
        "expected in the long run",
        "best interval (Daly)",
        "measured",
    ]
    text = _goodput.goodput_text(info)
    assert "checkpoints that take 20 s" in text
    assert f"the expected goodput there is {info.best:.0%}" in text
    drawn = _goodput.draw_goodput(info)
    assert list(drawn.data[2].customdata) == ["<br>3 steps lost", ""]
    assert list(drawn.data[2].hovertext) == ["every 2 steps", "every 3 steps"]
    ticks = drawn.layout.xaxis.ticktext
    assert "10 s" in ticks
    assert "10,000 s" in ticks
    assert len(figures.goodput(**TIMES).data) == 2


def test_labels_stand_away_from_the_curve_and_move_where_they_would_meet():
    on_curve = _goodput.goodput_info(**TIMES)
    at = dict(zip(on_curve.intervals_s, on_curve.goodputs, strict=True))
    place = min(at, key=lambda interval_s: abs(interval_s - 100))
    measured = [
        figures.MeasuredGoodput("above", place, at[place] + 0.05),
        figures.MeasuredGoodput("below", 1.1 * place, at[place] - 0.2),
        figures.MeasuredGoodput("close", 1.2 * place, at[place] - 0.2),
        figures.MeasuredGoodput("far", 9 * place, at[place] - 0.4),
    ]
    drawn = figures.goodput(**TIMES, measured=measured).data[2]
    assert list(drawn.textposition) == ["top center", "bottom center", "bottom center", "bottom center"]
    assert list(drawn.text) == ["above", "below", "<br>close", "far"]
