"""Break-even bandwidth of each compression method against the number of workers, one line per method.

On links slower than a method's line, exchanging the gradients of one step is faster compressed than uncompressed. On
faster links, compressing and decompressing takes longer than it saves. Whiskers show how much the measured times of
compressing and decompressing varied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from shardscope.analytic.communication.exchange import exchange_time
from shardscope.measure.compression.arguments import bandwidth_of
from shardscope.measure.compression.break_even import BUSY, BreakEven
from shardscope.spec.look import DASHES
from shardscope.spec.units import bit_rate_text
from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import method_look
from shardscope_widgets.words import bytes_text, count_text, duration_text, listed, plural

ANY_LINK = "any link"
_APART = 0.1
"""Distance between lines that pay off on any link, in decades."""
ONLY_EXCHANGE = "Exchange only: a whole step also computes, and gains less."


class LevelLine(NamedTuple):
    """One method: break-even bandwidth (bit/s) by number of workers.

    The bandwidth is None where compression never pays off, and infinite where it always does. `low_bits_per_s` is the
    break-even bandwidth with the median packing time instead of the fastest. `gain` is the speed-up of the exchange on
    the marked link; None if no link is marked.
    """

    label: str
    name: str
    workers: tuple[int, ...]
    bits_per_s: tuple[float | None, ...]
    low_bits_per_s: tuple[float | None, ...]
    hover: tuple[str, ...]
    gain: float | None = None


class BreakEvenInfo(NamedTuple):
    """All lines, sorted by the gain on the marked link, else by bandwidth among the job's own workers; highest first.

    `here` is the (workers, bit/s) of a link to mark, or None. `own_workers` is the job's number of workers, with which
    the text begins. `variation` is the largest ratio of median to fastest packing time.
    """

    model: str
    num_params: int
    lines: tuple[LevelLine, ...]
    here: tuple[int, float] | None
    own_workers: int
    variation: float


def break_even_info(found: BreakEven, *, here: tuple[int, float | str] | None = None) -> BreakEvenInfo:
    """Return the data of the chart for a result of `ss.break_even`.

    Args:
        found: Exchange times and break-even bandwidths of the methods.
        here: Number of workers and bandwidth of a link to mark, in bytes per second or as text with a unit.
    """
    own = found.own_workers if here is None or here[0] not in found.workers else here[0]
    bits = None if here is None else (here[0], 8 * bandwidth_of(here[1]))
    column = found.workers.index(own)
    rate = None if bits is None else bits[1] / 8
    lines = [
        _line(found, index)._replace(gain=_gain(found, index, column, rate))
        for index in range(len(found.methods))
    ]
    lines.sort(key=lambda line: -(line.bits_per_s[column] or 0.0) if line.gain is None else -line.gain)
    return BreakEvenInfo(found.label, found.num_params, tuple(lines), bits, own, found.variation)


def _gain(found: BreakEven, index: int, column: int, rate: float | None) -> float | None:
    """Return the speed-up of one method's exchange on a link with this bandwidth, in bytes per second."""
    if rate is None:
        return None
    plain, packed = (
        float(exchange_time(one[column], rate, found.latency_s))
        for one in (found.plain, found.methods[index].exchanges)
    )
    return plain / packed


def _line(found: BreakEven, index: int) -> LevelLine:
    method = found.methods[index]
    values, lows = (
        tuple(8 * bandwidth if bandwidth > 0 else None for bandwidth in bandwidths)
        for bandwidths in (method.bandwidths, method.low_bandwidths)
    )
    hover = []
    for plain, exchange, bits in zip(found.plain, method.exchanges, values, strict=True):
        level = "never" if bits is None else f"below {bit_rate_text(bits / 8)}" if bits < np.inf else ANY_LINK
        times = plain.sent_bytes / exchange.sent_bytes if exchange.sent_bytes else np.inf
        hover.append(
            f"{level}; each worker sends {bytes_text(exchange.sent_bytes)}, {times:.3g} times less; "
            f"packing and unpacking take {duration_text(exchange.codec_s)}"
        )
    return LevelLine(
        method.compression.label, method.compression.name, found.workers, values, lows, tuple(hover)
    )


def break_even_text(info: BreakEvenInfo) -> str:
    """Return sentences on the bandwidth below which each method pays off, first for the job's own workers."""
    if not info.lines:
        return "No method was measured."
    own, most = info.own_workers, info.lines[0].workers[-1]
    levels = _levels(info, own) if info.here is None else _gains(info, info.here[1] / 8)
    who = f"Among **{plural(own, 'worker')}**"
    told = [f"{who}, exchanging {info.model}'s gradients is faster compressed {levels}."]
    if most != own:
        told.append(f"Among {most}: {_levels(info, most)}.")
    if info.variation > BUSY:
        told.append(f"Packing times varied by {info.variation:.2g} times: the machine is busy, run again.")
    return " ".join([*told, ONLY_EXCHANGE])


def _gains(info: BreakEvenInfo, rate: float) -> str:
    """Return the gain of each method on a link of `rate` bytes per second, and the bandwidth at which the gain ends."""
    parts = []
    for line in info.lines:
        bits = line.bits_per_s[line.workers.index(info.own_workers)]
        if bits and line.gain is not None:
            where = ANY_LINK if bits == np.inf else f"below {bit_rate_text(bits / 8)}"
            parts.append(f"{line.gain:.3g} times with {line.label} ({where})")
    never = [line.label for line in info.lines if not line.bits_per_s[line.workers.index(info.own_workers)]]
    gains = [f"at {bit_rate_text(rate)}, largest gain first: {listed(parts)}"] if parts else []
    return "; ".join([*gains, *([f"never with {listed(never)}"] if never else [])])


def _levels(info: BreakEvenInfo, workers: int) -> str:
    """Return a clause on the bandwidth below which each method pays off for a number of workers."""
    levels = [(line.label, line.bits_per_s[line.workers.index(workers)]) for line in info.lines]
    paying = sorted(((bits, label) for label, bits in levels if bits and bits < np.inf), reverse=True)
    always = [label for label, bits in levels if bits == np.inf]
    never = [label for label, bits in levels if not bits]
    parts = [f"on any link with {listed(always)} (fewer messages in sequence)"] if always else []
    if paying:
        parts.append(f"below {listed(f'{bit_rate_text(bits / 8)} with {label}' for bits, label in paying)}")
    if never:
        parts.append(f"never with {listed(never)}")
    return "; ".join(parts)


def break_even(found: BreakEven, *, here: tuple[int, float | str] | None = None) -> go.Figure:
    """Draw the break-even bandwidth of each method against the number of workers.

    Args:
        found: Result of `ss.break_even`.
        here: Number of workers and bandwidth of a link to mark, in bytes per second or as text with a unit.
    """
    info = break_even_info(found, here=here)
    levels = [bits for line in info.lines for bits in (*line.bits_per_s, *line.low_bits_per_s) if bits]
    levels += [info.here[1]] if info.here else []
    low = np.log10(min([*levels, 1e8])) - 0.2
    high = np.ceil(np.log10(max([bits for bits in levels if bits < np.inf] + [1e10])))
    top = float(10 ** (high + 0.4))  # half a decade above the highest tick with a bandwidth
    always = [line.label for line in info.lines if np.inf in line.bits_per_s]
    figure = go.Figure([_trace(line, _level(line, top, always)) for line in info.lines])
    if info.here is not None:
        figure.add_trace(_here(*info.here))
    decades = [10.0**power for power in range(int(np.ceil(low)), int(high) + 1)]
    rates = [*(bit_rate_text(bits / 8) for bits in decades), ANY_LINK]
    workers: Sequence[int] = info.lines[0].workers if info.lines else (2, 4)
    figure.update_layout(
        xaxis=theme.axis("workers", type="log", tickvals=list(workers), ticktext=[str(w) for w in workers]),
        yaxis=theme.axis(
            "", type="log", range=[low, high + 0.6 + _APART * len(always)], tickvals=[*decades, top], ticktext=rates,
            showgrid=False,
        ),
        shapes=[theme.rule(theme.AXIS, y=bits, width=1, dash="dot") for bits in decades],
        annotations=[
            theme.note("<b>Exchange only: faster below the line</b>", x=0, y=1) | {"yshift": 6},
            theme.note(
                f"<span style='font-size:11px'>{info.model}, {count_text(info.num_params)} parameters; "
                "whole steps gain less</span>", x=0, y=0,
            )
            | {"yanchor": "top", "yshift": -40},
        ],
        showlegend=True,
    )  # fmt: skip
    return theme.style(
        figure, height=430, legend=theme.LEGEND_ABOVE, margin={"l": 8, "r": 12, "t": 78, "b": 62}
    )


def _level(line: LevelLine, top: float, always: Sequence[str]) -> float:
    """Return the height of the line of a method that pays off on any link; such lines are offset to avoid overlaps."""
    return float(top * 10 ** (_APART * always.index(line.label))) if line.label in always else top


def _trace(line: LevelLine, top: float) -> go.Scatter:
    """Return a line whose whiskers reach down to the bandwidths with the median packing time."""
    look = method_look(line.name)
    high, low = (
        [bits and min(bits, top) for bits in values] for values in (line.bits_per_s, line.low_bits_per_s)
    )
    down = [up - (least or 1.0) if up else 0.0 for up, least in zip(high, low, strict=True)]
    return go.Scatter(
        x=line.workers, y=high, name=line.label, mode="lines+markers", connectgaps=False,
        line={"color": look.colour, "dash": look.dash, "width": 2.2},
        marker={"symbol": look.symbol, "size": 8, "color": look.colour}, customdata=line.hover,
        zorder=DASHES.index(look.dash),  # dashed lines above solid ones, so that both can be seen
        error_y={
            "type": "data", "symmetric": False, "array": [0.0] * len(down), "arrayminus": down,
            "thickness": 1.2, "width": 4,
        },
        hovertemplate=f"<b>{line.label}</b> among %{{x}} workers pays off %{{customdata}}<extra></extra>",
    )  # fmt: skip


def _here(workers: int, bits: float) -> go.Scatter:
    return go.Scatter(
        x=[workers], y=[bits], name="this link", mode="markers", hoverinfo="name",
        marker={"symbol": "x", "size": 13, "color": "#d1495b", "line": {"width": 2, "color": "#fff"}},
    )  # fmt: skip
