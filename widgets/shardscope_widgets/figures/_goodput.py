"""Expected goodput against the interval between checkpoints, with the best interval and measured runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from shardscope.analytic import reliability
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._communication_look import log_ticks, tick_seconds
from shardscope_widgets.words import duration_text

_POINTS = 200
_SPAN = 60.0
"""Factor by which the axis extends below and above the best interval."""
_CLOSE = 3.0
"""Ratio of two intervals below which their labels would overlap."""
_LINE, _BEST, _MEASURED = "#2a86d1", "#11997a", "#e06c2c"


class MeasuredGoodput(NamedTuple):
    """A measured run: a short name, the training time between two checkpoints in seconds, the goodput, and a remark."""

    label: str
    interval_s: float
    goodput: float
    remark: str = ""
    """Text shown when the pointer is on the run, such as its number of lost steps."""


class GoodputInfo(NamedTuple):
    """Expected goodput by interval between checkpoints; all times are in seconds.

    Attributes:
        intervals_s: Intervals between checkpoints.
        goodputs: Expected goodput at each interval.
        young_s: The best interval by Young's formula.
        daly_s: The best interval by Daly's formula.
        best: Expected goodput at Daly's interval.
        mtbf_s: Mean time between failures.
        save_s: Time for which saving a checkpoint delays training.
        restart_s: Time from a failure to the first step after it.
        measured: Goodput of measured runs.
    """

    intervals_s: tuple[float, ...]
    goodputs: tuple[float, ...]
    young_s: float
    daly_s: float
    best: float
    mtbf_s: float
    save_s: float
    restart_s: float
    measured: tuple[MeasuredGoodput, ...] = ()


def goodput_info(
    *, mtbf_s: float, save_s: float, restart_s: float, measured: Sequence[MeasuredGoodput] = ()
) -> GoodputInfo:
    """Return the expected goodput as a function of the interval between checkpoints.

    Args:
        mtbf_s: Mean time between failures of the whole job, in seconds.
        save_s: Time for which saving a checkpoint delays training, in seconds.
        restart_s: Time from a failure to the first step after it, in seconds.
        measured: Goodput of measured runs.
    """
    times = {"save_s": save_s, "mtbf_s": mtbf_s}
    young, daly = float(reliability.young_interval_s(**times)), float(reliability.daly_interval_s(**times))
    ends = [young, daly, *(each.interval_s for each in measured)]
    longest = min(daly * _SPAN, 20 * mtbf_s)
    intervals = np.geomspace(min(*ends, daly / _SPAN), max(*ends, longest), _POINTS)
    expected = reliability.expected(**times, restart_s=restart_s, interval_s=intervals)
    best = reliability.expected(**times, restart_s=restart_s, interval_s=daly)
    return GoodputInfo(
        tuple(map(float, intervals)), tuple(map(float, expected.goodput)), young, daly, float(best.goodput),
        mtbf_s, save_s, restart_s, tuple(measured),
    )  # fmt: skip


def goodput_text(info: GoodputInfo) -> str:
    """Return a sentence on the best interval."""
    return (
        f"With a failure every {duration_text(info.mtbf_s)}, checkpoints that take {duration_text(info.save_s)} and "
        f"restarts that take {duration_text(info.restart_s)}, the best interval is {duration_text(info.young_s)} by "
        f"Young and {duration_text(info.daly_s)} by Daly; the expected goodput there is {info.best:.0%}."
    )


def _labels(info: GoodputInfo) -> list[tuple[str, str]]:
    """Return the text and the position of each label, above or below its marker so that it does not cover the curve.

    A label that would overlap the label on its left is moved by one line.
    """
    found: dict[MeasuredGoodput, tuple[str, str]] = {}
    last, moved = None, False
    for each in sorted(info.measured, key=lambda each: each.interval_s):
        is_above = each.goodput > np.interp(each.interval_s, info.intervals_s, info.goodputs)
        is_close = last is not None and each.interval_s < _CLOSE * last[0] and is_above == last[1]
        moved, last = is_close and not moved, (each.interval_s, is_above)
        text = (f"{each.label}<br>" if is_above else f"<br>{each.label}") if moved else each.label
        found[each] = (text, "top center" if is_above else "bottom center")
    return [found[each] for each in info.measured]


def draw_goodput(info: GoodputInfo) -> go.Figure:
    """Draw the figure for `info`."""
    labels = _labels(info)
    figure = go.Figure(
        [
            go.Scatter(
                x=info.intervals_s, y=info.goodputs, mode="lines", name="expected in the long run",
                line={"color": _LINE, "width": 2.6},
                hovertemplate="every %{x:.3s}s: %{y:.0%}<extra></extra>",
            ),
            go.Scatter(
                x=[info.daly_s], y=[info.best], mode="markers", name="best interval (Daly)",
                marker={"symbol": "diamond", "size": 11, "color": _BEST, "line": {"width": 1.5, "color": "#ffffff"}},
                hovertemplate="best: every %{x:.3s}s, %{y:.0%}<extra></extra>",
            ),
            go.Scatter(
                x=[each.interval_s for each in info.measured], y=[each.goodput for each in info.measured],
                mode="markers+text", name="measured", text=[text for text, _ in labels],
                textposition=[place for _, place in labels], textfont={"size": 11.5, "color": theme.GREY},
                cliponaxis=False,
                marker={"symbol": "square", "size": 10, "color": _MEASURED, "line": {"width": 1.5, "color": "#ffffff"}},
                customdata=[f"<br>{each.remark}" if each.remark else "" for each in info.measured],
                hovertext=[each.label for each in info.measured],
                hovertemplate="%{hovertext}: %{y:.0%}%{customdata}<extra></extra>",
            ),
        ][: 3 if info.measured else 2]
    )  # fmt: skip
    figure.update_layout(
        xaxis=theme.axis(
            "training time between checkpoints",
            **log_ticks(info.intervals_s[0], info.intervals_s[-1], tick_seconds),
        ),
        yaxis=theme.axis("goodput", tickformat=".0%", range=[0, min(1.0, max(info.goodputs) * 1.25 + 0.02)]),
        shapes=[theme.rule(theme.AXIS, x=info.young_s, width=1.2, dash="dot")],
        annotations=[
            theme.note("Young", x=float(np.log10(info.young_s)), y=1)
            | {"xref": "x", "font": {"size": 11.5, "color": theme.GREY}, "xshift": 4, "yanchor": "top"}
        ],
    )
    return theme.style(figure, height=320, head=44)


def goodput(
    *, mtbf_s: float, save_s: float, restart_s: float, measured: Sequence[MeasuredGoodput] = ()
) -> go.Figure:
    """Draw the expected goodput over the interval between checkpoints; see `goodput_info`.

    Example:
        >>> figure = goodput(mtbf_s=3 * 3600, save_s=20, restart_s=600)
    """
    return draw_goodput(goodput_info(mtbf_s=mtbf_s, save_s=save_s, restart_s=restart_s, measured=measured))
