"""Large-batch sweep: quality after the same number of samples, and training time, of each optimizer by batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.spec import Optimizer, registry
from shardscope.spec.look import YOUR_OWN, MethodStyle
from shardscope.tuning.sweep_result import BatchSweep, SweepPoint
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._front import log_ticks
from shardscope_widgets.words import duration_text

_APART = 1.025
"""Factor by which the x positions of successive optimizers' points differ, so that they do not overlap."""
_TARGET = "#d1495b"
_LEFT, _RIGHT = [0.0, 0.52], [0.6, 1.0]
QUALITY_WORDS = {"loss": "validation loss", "error": "validation error"}


class SweepLine(NamedTuple):
    """One optimizer's line: median, lowest and highest quality over seeds at each batch size, and training time.

    `medians` is None where most seeds failed; `lows` and `highs` are None where all seeds failed. `seconds` is the
    training time of a run, None if it was not measured. `largest` is the largest batch size that reaches the target;
    None if there is none. `edge` says whether the best rate at the first batch size that misses the target is the
    ``lowest`` or ``highest`` tried. `accuracies` are median fractions of right answers on the validation split, None
    where they are unknown; `straddles` is true where some seeds reach the target and others do not. `is_layerwise` is
    true of optimizers such as LAMB and LARS.
    """

    optimizer: str
    batches: tuple[int, ...]
    steps: tuple[int, ...]
    medians: tuple[float | None, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    seconds: tuple[float | None, ...]
    hover: tuple[str, ...]
    largest: int | None
    edge: str | None
    is_layerwise: bool
    accuracies: tuple[float | None, ...]
    straddles: tuple[bool, ...]

    @property
    def num_reached(self) -> int:
        """Number of batch sizes that reach the target, from the smallest on."""
        return 0 if self.largest is None else self.batches.index(self.largest) + 1


class SweepInfo(NamedTuple):
    """The lines of all optimizers, the target quality and its origin, and the critical batch size if it is known.

    `num_samples` is the number of samples that every run trains on; `batches` are all sizes that were asked for.
    """

    quality: str
    target: float
    lines: tuple[SweepLine, ...]
    num_seeds: int
    target_from: SweepPoint | None
    critical_batch: float | None
    num_samples: int
    batches: tuple[int, ...]


def batch_sweep_info(sweep: BatchSweep, *, critical_batch: float | None = None) -> SweepInfo:
    """Return the data of the chart for a sweep.

    Args:
        sweep: Result of ``shardscope.batch_sweep``.
        critical_batch: Critical batch size, in samples, measured from the gradient noise of the same job.
    """
    names = dict.fromkeys(point.optimizer for point in sweep.points)
    return SweepInfo(
        sweep.quality, sweep.target, tuple(_line(sweep, name) for name in names),
        max(point.num_seeds for point in sweep.points), sweep.target_from, critical_batch,
        sweep.num_samples, sweep.batches,
    )  # fmt: skip


def _line(sweep: BatchSweep, name: str) -> SweepLine:
    points = sorted((p for p in sweep.points if p.optimizer == name), key=lambda p: p.batch)
    optimizer = registry.find(Optimizer, name)
    return SweepLine(
        name,
        tuple(p.batch for p in points),
        tuple(p.steps for p in points),
        tuple(p.median if math.isfinite(p.median) else None for p in points),
        tuple(min(p.values, default=None) for p in points),
        tuple(max(p.values, default=None) for p in points),
        tuple(p.seconds for p in points),
        tuple(_hover(p) for p in points),
        sweep.largest(name),
        next((p.edge for p in points if not p.reaches(sweep.target)), None),
        optimizer is not None and optimizer.without_ratios is not None,
        tuple(p.accuracy for p in points),
        tuple(p.straddles(sweep.target) for p in points),
    )


def _hover(point: SweepPoint) -> str:
    failed = point.num_seeds - len(point.values)
    seeds = ", ".join(f"{value:.4g}" for value in point.values) or "none"
    time = "" if point.step_s is None else f" of {duration_text(point.step_s)}"
    accuracy = "" if point.accuracy is None else f"accuracy {point.accuracy:.1%}<br>"
    tried = f", {point.edge or 'inside'} of {len(point.rates)} tried" if len(point.rates) > 1 else ""
    return (
        f"{accuracy}{point.steps} steps{time}<br>rate {point.rate:.3g}{tried}<br>seeds: {seeds}"
        f"{f'; {failed} failed' if failed else ''}"
    )


def draw_batch_sweep(info: SweepInfo) -> go.Figure:
    """Draw quality (median over seeds, whiskers to the lowest and highest) on the left, training time on the right."""
    figure = go.Figure()
    for place, line in enumerate(info.lines):
        beside = _APART ** (place - (len(info.lines) - 1) / 2)
        figure.add_traces([_trace(line, beside=beside), _time_trace(line, beside=beside)])
    highs = [high for line in info.lines for high in line.highs if high is not None]
    lows = [low for line in info.lines for low in line.lows if low is not None]
    seconds = [time for line in info.lines for time in line.seconds if time is not None]
    is_log = min([info.target, *lows]) > 0  # errors may be 0
    batches = sorted({batch for line in info.lines for batch in line.batches})
    sizes = {"type": "log", "tickvals": batches, "ticktext": [str(b) for b in batches]}
    note = "one seed" if info.num_seeds == 1 else f"median and range of {info.num_seeds} seeds"
    figure.update_layout(
        xaxis=theme.axis("batch size, samples", domain=_LEFT, anchor="y", **sizes),
        yaxis=theme.axis("", anchor="x", **({"type": "log"} | _ticks([info.target, *lows, *highs]) if is_log else {})),
        xaxis2=theme.axis("batch size, samples", domain=_RIGHT, anchor="y2", matches="x", **sizes),
        yaxis2=theme.axis("", anchor="x2", type="log", **_ticks(seconds)),
        shapes=[
            *([theme.rule(_TARGET, y=info.target, along="x domain", width=1.4, dash="dot")]
              if math.isfinite(info.target) else []),
            *_critical_rules(info),
        ],
        annotations=[
            theme.heading(QUALITY_WORDS[info.quality].capitalize(), note, x=_LEFT[0]),
            theme.heading("Seconds of training", "open: missed", x=_RIGHT[0]),
            *([_target_name(info.target, is_log=is_log)] if math.isfinite(info.target) else []),
            *_critical_name(info),
        ],
        showlegend=True,
    )  # fmt: skip
    return theme.style(
        figure, height=436, legend=theme.LEGEND_ABOVE, margin={"l": 8, "r": 12, "t": 94, "b": 8}
    )


def _critical_rules(info: SweepInfo) -> list[dict[str, Any]]:
    if info.critical_batch is None:
        return []
    return [
        theme.rule(theme.GREY, x=info.critical_batch, axis=axis, along=f"y{axis} domain", width=1.2)
        for axis in ("", "2")
    ]


def _critical_name(info: SweepInfo) -> list[dict[str, Any]]:
    if info.critical_batch is None:
        return []
    place = {"xref": "x2", "yref": "y2 domain", "xanchor": "left", "yanchor": "top", "xshift": 4}
    look = {"font": {"size": 11, "color": theme.GREY}}
    text = f"critical batch size, {info.critical_batch:.0f}"
    return [theme.note(text, x=math.log10(info.critical_batch), y=1) | place | look]


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    known = [value for value in values if math.isfinite(value)]
    return log_ticks(min(known), max(known)) if known else {}


def _look(line: SweepLine) -> MethodStyle:
    optimizer = registry.find(Optimizer, line.optimizer)
    return optimizer.look if optimizer else YOUR_OWN


def _trace(line: SweepLine, *, beside: float) -> go.Scatter:
    """Return a line whose points are offset horizontally by the factor `beside`, so that whiskers do not overlap."""
    colour, dash, symbol = _look(line)
    ups = [_apart(high, middle) for high, middle in zip(line.highs, line.medians, strict=True)]
    downs = [_apart(middle, low) for middle, low in zip(line.medians, line.lows, strict=True)]
    return go.Scatter(
        x=[batch * beside for batch in line.batches], y=line.medians, name=line.optimizer,
        mode="lines+markers", connectgaps=False, legendgroup=line.optimizer,
        line={"color": colour, "dash": dash, "width": 2.2}, marker={"symbol": symbol, "size": 9, "color": colour},
        error_y={"type": "data", "array": ups, "arrayminus": downs, "color": colour, "thickness": 1.2, "width": 4},
        customdata=list(zip(line.hover, line.batches, strict=True)),
        hovertemplate=f"<b>{line.optimizer}</b> at batch %{{customdata[1]}}: %{{y:.4g}}<br>"
        "%{customdata[0]}<extra></extra>",
    )  # fmt: skip


def _time_trace(line: SweepLine, *, beside: float) -> go.Scatter:
    """Return the training time of a run by batch size; markers are open where the target is missed."""
    colour, dash, symbol = _look(line)
    symbols = [symbol if n < line.num_reached else f"{symbol}-open" for n in range(len(line.batches))]
    return go.Scatter(
        x=[batch * beside for batch in line.batches], y=line.seconds, name=line.optimizer, xaxis="x2", yaxis="y2",
        mode="lines+markers", connectgaps=False, legendgroup=line.optimizer, showlegend=False,
        line={"color": colour, "dash": dash, "width": 2.2}, marker={"symbol": symbols, "size": 9, "color": colour},
        customdata=list(zip(line.hover, line.batches, strict=True)),
        hovertemplate=f"<b>{line.optimizer}</b> at batch %{{customdata[1]}}: %{{y:.3s}}s<br>"
        "%{customdata[0]}<extra></extra>",
    )  # fmt: skip


def _apart(upper: float | None, lower: float | None) -> float | None:
    return None if upper is None or lower is None else max(0.0, upper - lower)


def _target_name(value: float, *, is_log: bool) -> dict[str, Any]:
    return {
        "text": "target", "xref": "x domain", "x": 0.01, "xanchor": "left", "yref": "y",
        "y": math.log10(value) if is_log else value, "yanchor": "bottom", "showarrow": False,
        "font": {"size": 11, "color": _TARGET},
    }  # fmt: skip


def batch_sweep(sweep: BatchSweep, *, critical_batch: float | None = None) -> go.Figure:
    """Draw the quality that each optimizer reaches at each batch size after the same number of samples, and its time.

    Args:
        sweep: Result of ``shardscope.batch_sweep``.
        critical_batch: Critical batch size, in samples, measured from the gradient noise of the same job; also drawn.
    """
    return draw_batch_sweep(batch_sweep_info(sweep, critical_batch=critical_batch))
