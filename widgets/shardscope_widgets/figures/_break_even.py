"""Break-even bandwidth of each compression method against the number of workers, one line per method.

On links slower than a method's line, exchanging the gradients of one step is faster compressed than uncompressed. On
faster links, compressing and decompressing takes longer than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from shardscope.measure.break_even import BreakEven
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._compression_look import method_look
from shardscope_widgets.words import bytes_text, count_text, listed, plural, seconds_text

_HIGHEST = 1e12  # bytes per second


class LevelLine(NamedTuple):
    """One method: break-even bandwidth (bit/s) by number of workers.

    It is None where compression never pays off, and 8 * `_HIGHEST` where it always does.
    """

    label: str
    name: str
    workers: tuple[int, ...]
    bits_per_s: tuple[float | None, ...]
    hover: tuple[str, ...]


class BreakEvenInfo(NamedTuple):
    """All lines, sorted by bandwidth at the largest number of workers, highest first.

    `here` is the (workers, bit/s) of a link to mark, or None.
    """

    model: str
    num_params: int
    lines: tuple[LevelLine, ...]
    here: tuple[int, float] | None


def break_even_info(found: BreakEven, *, here: tuple[int, float] | None = None) -> BreakEvenInfo:
    """Return the data of the chart for a result of `shardscope.measure.break_even`.

    Args:
        found: Exchange times and break-even bandwidths of the methods.
        here: (workers, bytes per second) of a link to mark.
    """
    lines = [_line(found, index) for index in range(len(found.methods))]
    lines.sort(key=lambda line: -(line.bits_per_s[-1] or 0.0))
    bits = None if here is None else (here[0], 8 * here[1])
    return BreakEvenInfo(found.label, found.num_params, tuple(lines), bits)


def _line(found: BreakEven, index: int) -> LevelLine:
    method = found.methods[index]
    values, hover = [], []
    for plain, exchange, bandwidth in zip(found.plain, method.exchanges, method.bandwidths, strict=True):
        values.append(8 * min(bandwidth, _HIGHEST) if bandwidth > 0 else None)
        times = plain.sent_bytes / exchange.sent_bytes if exchange.sent_bytes else np.inf
        hover.append(
            f"sends {bytes_text(exchange.sent_bytes)}, {times:.3g} times less; "
            f"packing and unpacking take {seconds_text(exchange.codec_s)}"
        )
    return LevelLine(
        method.compression.label, method.compression.name, found.workers, tuple(values), tuple(hover)
    )


def break_even_text(info: BreakEvenInfo) -> str:
    """Describe the chart in words."""
    if not info.lines:
        return "No method was measured."
    workers = info.lines[0].workers[-1]
    paying = [(line.label, line.bits_per_s[-1]) for line in info.lines if line.bits_per_s[-1]]
    always = [label for label, bits in paying if bits and bits >= 8 * _HIGHEST]
    never = [line.label for line in info.lines if not line.bits_per_s[-1]]
    parts = [f"{label} below {rate_bits(bits)}" for label, bits in paying if bits and label not in always]
    parts += [f"{listed(always)} on any link, because fewer messages follow one another"] if always else []
    ways = listed(parts) if parts else "none of the methods on any link"
    text = f"Among {plural(workers, 'worker')}, compressing {info.model}'s gradients pays off with {ways}."
    return f"{text} Never: {listed(never)}." if never else text


def rate_bits(bits_per_s: float) -> str:
    """Format a bit rate as ``1.25 Gbit/s``."""
    for factor, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_s >= factor:
            return f"{bits_per_s / factor:.3g} {unit}"
    return f"{bits_per_s / 1e3:.3g} kbit/s"


def draw(info: BreakEvenInfo) -> go.Figure:
    """Draw the figure for `info`, with logarithmic axes."""
    figure = go.Figure([_trace(line) for line in info.lines])
    if info.here is not None:
        figure.add_trace(_here(*info.here))
    top = max((value for line in info.lines for value in line.bits_per_s if value), default=1e10)
    bottom = min((value for line in info.lines for value in line.bits_per_s if value), default=1e7)
    low, high = np.log10(min(bottom, 1e8)) - 0.2, np.log10(min(max(top, 1e10), 8 * _HIGHEST)) + 0.2
    decades = [10.0**power for power in range(int(np.ceil(low)), int(high) + 1)]
    workers: Sequence[int] = info.lines[0].workers if info.lines else (2, 4)
    figure.update_layout(
        xaxis=theme.axis("workers", type="log", tickvals=list(workers), ticktext=[str(w) for w in workers]),
        yaxis=theme.axis(
            "", type="log", range=[low, high], tickvals=decades, ticktext=[*map(rate_bits, decades)], showgrid=False
        ),
        shapes=[_across(bits) for bits in decades],
        annotations=[
            theme.note(
                f"<b>Compression pays off below the line</b>  <span style='font-size:11px'>{info.model}, "
                f"{count_text(info.num_params)} parameters</span>", x=0, y=1,
            ) | {"yshift": 6},
        ],
        showlegend=True,
    )  # fmt: skip
    return theme.style(
        figure, height=430, legend=theme.LEGEND_ABOVE, margin={"l": 8, "r": 12, "t": 78, "b": 8}
    )


def _trace(line: LevelLine) -> go.Scatter:
    look = method_look(line.name)
    return go.Scatter(
        x=line.workers, y=line.bits_per_s, name=line.label, mode="lines+markers", connectgaps=False,
        line={"color": look.colour, "dash": look.dash, "width": 2.2},
        marker={"symbol": look.symbol, "size": 8, "color": look.colour}, customdata=line.hover,
        hovertemplate=f"<b>{line.label}</b> pays off below %{{y:.3~s}}bit/s<br>"
        "among %{x} workers: %{customdata}<extra></extra>",
    )  # fmt: skip


def _here(workers: int, bits: float) -> go.Scatter:
    return go.Scatter(
        x=[workers], y=[bits], name="this link", mode="markers", hoverinfo="name",
        marker={"symbol": "x", "size": 13, "color": "#d1495b", "line": {"width": 2, "color": "#fff"}},
    )  # fmt: skip


def _across(bits: float) -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": bits, "y1": bits,
        "line": {"color": theme.AXIS, "width": 1, "dash": "dot"},
    }  # fmt: skip


def break_even(found: BreakEven, *, here: tuple[int, float] | None = None) -> go.Figure:
    """Draw the break-even bandwidth of each method against the number of workers.

    Args:
        found: Result of `shardscope.measure.break_even`.
        here: (workers, bytes per second) of a link to mark.
    """
    return draw(break_even_info(found, here=here))
