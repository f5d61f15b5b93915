"""Large-batch sweep: validation loss or error of each optimizer at each batch size, after the same number of epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.spec import Optimizer, registry
from shardscope.spec.look import YOUR_OWN
from shardscope.tuning.batch_sweep import BatchSweep, SweepPoint
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._front import log_ticks
from shardscope_widgets.words import listed

_APART = 1.025
"""Factor by which the x positions of successive optimizers' points differ, so that they do not overlap."""
_WORDS = {"loss": "validation loss", "error": "validation error"}


class SweepLine(NamedTuple):
    """One optimizer: median, lowest and highest quality over seeds at each batch size.

    `medians` has None where most seeds failed, `lows` and `highs` where all did. `largest` is the largest batch size
    that reaches the target; None if none does.
    """

    optimizer: str
    batches: tuple[int, ...]
    medians: tuple[float | None, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    hover: tuple[str, ...]
    largest: int | None


class SweepInfo(NamedTuple):
    """The lines of all optimizers, and the target quality."""

    quality: str
    target: float
    lines: tuple[SweepLine, ...]


def batch_sweep_info(sweep: BatchSweep) -> SweepInfo:
    """Return the data of the chart for a sweep."""
    names = dict.fromkeys(point.optimizer for point in sweep.points)
    return SweepInfo(sweep.quality, sweep.target, tuple(_line(sweep, name) for name in names))


def _line(sweep: BatchSweep, optimizer: str) -> SweepLine:
    points = sorted((p for p in sweep.points if p.optimizer == optimizer), key=lambda p: p.batch)
    return SweepLine(
        optimizer,
        tuple(p.batch for p in points),
        tuple(p.median if math.isfinite(p.median) else None for p in points),
        tuple(min(p.values, default=None) for p in points),
        tuple(max(p.values, default=None) for p in points),
        tuple(_hover(p) for p in points),
        sweep.largest(optimizer),
    )


def _hover(point: SweepPoint) -> str:
    failed = point.num_seeds - len(point.values)
    seeds = ", ".join(f"{value:.4g}" for value in point.values) or "none"
    return f"{point.steps} steps at rate {point.rate:.3g}<br>seeds: {seeds}{f'; {failed} failed' if failed else ''}"


def batch_sweep_text(info: SweepInfo) -> str:
    """Describe the chart in words."""
    reached = [f"{line.optimizer} up to {line.largest}" for line in info.lines if line.largest is not None]
    never = [line.optimizer for line in info.lines if line.largest is None]
    said = f"Within the same number of epochs, a {_WORDS[info.quality]} of {info.target:.3g} is reached by "
    said += listed(reached) if reached else "none of the optimizers at any of these batches"
    return f"{said}{f'; not by {listed(never)}' if reached and never else ''}."


def draw_batch_sweep(info: SweepInfo) -> go.Figure:
    """Draw the median over seeds as lines, with whiskers from the lowest to the highest seed, and the target value."""
    figure = go.Figure()
    for place, line in enumerate(info.lines):
        figure.add_trace(_trace(line, beside=_APART ** (place - (len(info.lines) - 1) / 2)))
    highs = [high for line in info.lines for high in line.highs if high is not None]
    lows = [low for line in info.lines for low in line.lows if low is not None]
    is_log = min([info.target, *lows]) > 0  # errors may be 0
    batches = sorted({batch for line in info.lines for batch in line.batches})
    figure.update_layout(
        xaxis=theme.axis("batch, samples", type="log", tickvals=batches, ticktext=[str(b) for b in batches]),
        yaxis=theme.axis("", **({"type": "log"} | _ticks([info.target, *lows, *highs]) if is_log else {})),
        shapes=[_target(info.target)] if math.isfinite(info.target) else [],
        annotations=[
            theme.note(f"<b>{_WORDS[info.quality].capitalize()}</b>  <span style='font-size:11px'>after the same "
                       "number of epochs: median over seeds, whiskers from lowest to highest</span>", x=0, y=1)
            | {"yshift": 6},
            *([_target_name(info.target, is_log=is_log)] if math.isfinite(info.target) else []),
        ],
        showlegend=True,
    )  # fmt: skip
    return theme.style(
        figure, height=420, legend=theme.LEGEND_ABOVE, margin={"l": 8, "r": 12, "t": 78, "b": 8}
    )


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    known = [value for value in values if math.isfinite(value)]
    return log_ticks(min(known), max(known)) if known else {}


def _trace(line: SweepLine, *, beside: float) -> go.Scatter:
    """Return a line whose points are offset horizontally by the factor `beside`, so that whiskers do not overlap."""
    optimizer = registry.find(Optimizer, line.optimizer)
    colour, dash, symbol = optimizer.look if optimizer else YOUR_OWN
    ups = [_apart(high, middle) for high, middle in zip(line.highs, line.medians, strict=True)]
    downs = [_apart(middle, low) for middle, low in zip(line.medians, line.lows, strict=True)]
    return go.Scatter(
        x=[batch * beside for batch in line.batches], y=line.medians, name=line.optimizer,
        mode="lines+markers", connectgaps=False,
        line={"color": colour, "dash": dash, "width": 2.2}, marker={"symbol": symbol, "size": 9, "color": colour},
        error_y={"type": "data", "array": ups, "arrayminus": downs, "color": colour, "thickness": 1.2, "width": 4},
        customdata=list(zip(line.hover, line.batches, strict=True)),
        hovertemplate=f"<b>{line.optimizer}</b> at batch %{{customdata[1]}}: %{{y:.4g}}<br>"
        "%{customdata[0]}<extra></extra>",
    )  # fmt: skip


def _apart(upper: float | None, lower: float | None) -> float | None:
    return None if upper is None or lower is None else max(0.0, upper - lower)


def _target(value: float) -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": value, "y1": value,
        "line": {"color": "#d1495b", "width": 1.4, "dash": "dot"},
    }  # fmt: skip


def _target_name(value: float, *, is_log: bool) -> dict[str, Any]:
    return {
        "text": "target", "xref": "paper", "x": 0.004, "xanchor": "left", "yref": "y",
        "y": math.log10(value) if is_log else value, "yanchor": "bottom", "showarrow": False,
        "font": {"size": 11, "color": "#d1495b"},
    }  # fmt: skip


def batch_sweep(sweep: BatchSweep) -> go.Figure:
    """Draw the quality that each optimizer reaches at each batch size after the same number of epochs."""
    return draw_batch_sweep(batch_sweep_info(sweep))
