"""Layers of a run: a heat map of trust ratios over steps, and the compression residual of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.alarms import CARRIES, LATE, carrying
from shardscope.runlog.layers import Layers, RatioSeries, ResidualSeries
from shardscope_widgets.figures import theme
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import listed, plural, three_digits

MOST_SAMPLES = 120
"""Maximum number of steps drawn; for longer runs, every second, third, ... sampled step and the last are drawn."""
MOST_NAMED = 5
"""Number of layers drawn in colour: those with the largest residuals among the layers that alarms check. All other
layers are grey."""
COLOURS = ("#e06c2c", "#2a86d1", "#11997a", "#b866a6", "#c49a0c")
KIND_DASHES = {"residual": "solid", "unsent": "solid", "share": "dot"}
SCALE = ((0.0, "#46327e"), (0.25, "#365c8d"), (0.5, "#277f8e"), (0.75, "#4ac16d"), (1.0, "#f1e51d"))
"""The inner part of viridis: every colour contrasts with both a white and a black background."""
ALARM = "#c5372c"
_ROW, _LEAST_ROW, _TOP, _BOTTOM = 15, 10, 78, 44
_LEAST, _MOST = 320, 720
_MOST_APART = 45
"""Maximum number of columns drawn with gaps between them."""


class RatioRow(NamedTuple):
    """One row of the heat map: values of a layer by step; None where it has no ratio or was not sampled."""

    layer: str
    ratio: tuple[float | None, ...]
    weight_norm: tuple[float | None, ...]
    update_norm: tuple[float | None, ...]
    bound: tuple[str, ...]


class Debt(NamedTuple):
    """Residual norm of one layer by step, relative to the norm of one step's gradient; drawn as a line."""

    layer: str
    kind: str
    steps: tuple[int, ...]
    relative: tuple[float | None, ...]
    residuals: tuple[float, ...]
    is_checked: bool = True
    """Whether alarms check this residual; false if the layer's gradient is small (see `shardscope.runlog.alarms`)."""

    @property
    def last(self) -> float:
        """The newest finite value of `relative`; 0 if there is none."""
        return next((value for value in reversed(self.relative) if value is not None), 0.0)


class LayersInfo(NamedTuple):
    """Trust ratios, residuals (`debts`, largest first) and alarms (sentences) of the layers of a run."""

    label: str
    steps: tuple[int, ...]
    rows: tuple[RatioRow, ...]
    debts: tuple[Debt, ...]
    alarms: tuple[str, ...]

    is_late: bool = False
    """Whether one of the alarms is about a residual above the threshold."""

    @property
    def is_telling(self) -> bool:
        """Whether any layer has a trust ratio or a residual to draw."""
        return bool(self.debts) or any(value is not None for row in self.rows for value in row.ratio)


def layers_info(layers: Layers, *, label: str = "") -> LayersInfo:
    """Return the data of the figure from a run's layers (``run.layers()``); `label` is the run's name."""
    steps = _thinned(sorted({step for series in layers.ratios for step in series.steps}))
    checked = {(series.layer, series.kind) for series in carrying(layers.residuals)}
    debts = sorted(
        (_debt(series, is_checked=(series.layer, series.kind) in checked) for series in layers.residuals),
        key=lambda debt: -debt.last,
    )
    rows = tuple(_row(series, steps) for series in layers.ratios)
    return LayersInfo(
        label, tuple(steps), rows, tuple(debts), tuple(map(str, layers.alarms)),
        any(alarm.kind == "late" for alarm in layers.alarms),
    )  # fmt: skip


def layers_info_of(trace: Trace) -> LayersInfo:
    """Return the data of the figure from a trace.

    For a long run, only evenly spaced sampled steps are kept; the alarms are based on more steps than are drawn.
    """
    return layers_info(trace.layer_samples.layers(trace.optimizer), label=trace.label)


def _thinned(steps: Sequence[int]) -> list[int]:
    every = max(1, math.ceil(len(steps) / MOST_SAMPLES))
    return [*steps[:-1:every], *steps[-1:]]


def _row(series: RatioSeries, steps: Sequence[int]) -> RatioRow:
    place = {step: i for i, step in enumerate(series.steps)}
    ratio, weights, updates = (
        tuple(_finite(column[place[step]]) if step in place else None for step in steps)
        for column in (series.ratio, series.weight_norm, series.update_norm)
    )
    bound = tuple((series.bound[place[step]] or "") if step in place else "" for step in steps)
    return RatioRow(series.layer, ratio, weights, updates, bound)


def _debt(series: ResidualSeries, *, is_checked: bool) -> Debt:
    kept = set(_thinned(series.steps))
    chosen = [i for i, step in enumerate(series.steps) if step in kept]
    relative = tuple(_finite(series.relative[i]) for i in chosen)
    steps, residuals = tuple(series.steps[i] for i in chosen), tuple(series.norm[i] for i in chosen)
    return Debt(series.layer, series.kind, steps, relative, residuals, is_checked)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def layers_text(info: LayersInfo) -> str:
    """Return sentences on the range of trust ratios and the largest residual, and one line per alarm."""
    if not info.is_telling:
        return "No step has been sampled yet."
    named = f"{info.label}: " if info.label else ""
    parts = [part for part in (_ratio_words(info), _debt_words(info)) if part]
    told = ". ".join([parts[0], *(part[0].upper() + part[1:] for part in parts[1:])])
    lines = [f"{named}{told}. {'' if info.alarms else 'No alarm.'}".strip()]
    return "\n".join([*lines, *(f"Alarm: {text}." for text in info.alarms)])


def _ratio_words(info: LayersInfo) -> str:
    last = [(row.ratio[-1], row.layer) for row in info.rows if row.ratio and row.ratio[-1] is not None]
    if not last:
        is_adapted = any(value is not None for row in info.rows for value in row.ratio)
        return f"no trust ratio is known at step {info.steps[-1]}" if is_adapted else ""
    low, high = min(last), max(last)
    words = (
        f"trust ratios at step {info.steps[-1]} lie between {_number(low[0])} ({low[1]}) and {_number(high[0])} "
        f"({high[1]})"
    )
    plain = [row.layer for row in info.rows if all(value is None for value in row.ratio)]
    held = sorted({bound for row in info.rows for bound in row.bound if bound})
    words += f"; {plural(len(plain), 'layer')} without a trust ratio" if plain else ""
    return words + (f"; crosses mark ratios limited by {listed(held)}" if held else "")


def _debt_words(info: LayersInfo) -> str:
    if not info.debts:
        return ""
    most = info.debts[0]
    said = f"the largest residual, that of {most.layer}, has {_number(most.last)} times the norm of a step's gradient"
    small = [debt for debt in info.debts if not debt.is_checked and debt.last > LATE]
    if small:
        raises = "raises" if len(small) == 1 else "raise"
        said += (
            f"; {plural(len(small), 'layer')} above the threshold of {LATE:g} {raises} no alarm, because "
            f"gradients with less than {CARRIES:.0%} of the whole gradient's norm can be sent late with little harm"
        )
    brief = [debt.layer for debt in info.debts if debt.is_checked and debt.last > LATE and not info.is_late]
    if brief:
        verb = "exceeds" if len(brief) == 1 else "exceed"
        said += f"; {listed(brief)} {verb} {LATE:g} only at the end, which raises no alarm"
    return said


def _number(value: float | None) -> str:
    return three_digits(value or 0.0)


def draw_layers(info: LayersInfo) -> go.Figure:
    """Draw the heat map and the residuals, side by side if both exist."""
    has_map = any(value is not None for row in info.rows for value in row.ratio)
    left, right = ([0.0, 0.56], [0.72, 1.0]) if has_map and info.debts else ([0.0, 1.0], [0.0, 1.0])
    figure = go.Figure()
    layout: dict[str, Any] = {"annotations": [], "shapes": []}
    height = _LEAST
    if has_map:
        height = min(_MOST, max(_LEAST, _TOP + _BOTTOM + _ROW * len(info.rows)))
        figure.add_traces(_map(info, left, height))
        layout |= _map_axes(info, left, height)
        about = "of each layer; crosses: limited by a bound"
        layout["annotations"].append(theme.heading("Trust ratio", about, x=left[0]))
    if info.debts:
        figure.add_traces(_debts(info))
        layout |= _debt_axes(info, right)
        shares = (
            "; dotted: of a rank's share of the mean"
            if any(debt.kind == "share" for debt in info.debts)
            else ""
        )
        layout["annotations"] += [
            theme.heading("Residual norm", f"÷ gradient norm{shares}", x=right[0]),
            _late_note(info),
        ]
        layout["shapes"].append(theme.rule(ALARM, y=LATE, axis="2", along="x2 domain", width=1.4))
    figure.update_layout(layout, showlegend=bool(info.debts))
    legend = {
        "orientation": "h",
        "y": 0,
        "yref": "container",
        "yanchor": "bottom",
        **({"x": 1, "xanchor": "right"} if has_map else {"x": 0}),
        "font": {"size": 10.5},
    }
    return theme.style(
        figure, height=height, legend=legend, margin={"l": 8, "r": 12, "t": 52, "b": 74 if info.debts else 8}
    )


def _map(info: LayersInfo, place: list[float], height: int) -> list[Any]:
    logs = [[math.log10(value) if value else None for value in row.ratio] for row in info.rows]
    known = [value for row in logs for value in row if value is not None]
    ticks = list(range(math.floor(min(known)), math.ceil(max(known)) + 1))
    texts = [[_hover(row, i) for i in range(len(info.steps))] for row in info.rows]
    columns = list(range(len(info.steps)))
    cells = go.Heatmap(
        x=columns, y=list(range(len(info.rows))), z=logs, text=texts, hovertemplate="%{text}<extra></extra>",
        colorscale=list(SCALE), xgap=int(len(info.steps) <= _MOST_APART), ygap=1, hoverongaps=False, showlegend=False,
        colorbar={
            "tickvals": ticks, "ticktext": [f"{10.0**tick:g}" for tick in ticks], "thickness": 9, "len": 1, "y": 0.5,
            "x": place[1] + 0.005, "outlinewidth": 0, "tickfont": {"size": 10.5}, "ticks": "", "xpad": 4,
        },
    )  # fmt: skip
    held = [(i, j) for j, row in enumerate(info.rows) for i, bound in enumerate(row.bound) if bound]
    crosses = go.Scatter(
        x=[i for i, _ in held], y=[j for _, j in held], mode="markers", hoverinfo="skip", showlegend=False,
        marker={
            "symbol": "x-thin", "size": _cross(info, height),
            "line": {"width": 1.3, "color": [_ink(logs[j][i], min(known), max(known)) for i, j in held]},
        },
    )  # fmt: skip
    return [cells, crosses]


def _ink(value: float | None, low: float, high: float) -> str:
    """Return a colour that is readable on a cell with this value."""
    return "#10151b" if value is not None and value - low > 0.6 * (high - low) else "#ffffff"


def _cross(info: LayersInfo, height: int) -> float:
    """Return the size in pixels of a cross that fits a cell."""
    return max(3.0, min(7.0, 0.45 * (height - _TOP - _BOTTOM) / len(info.rows), 340 / len(info.steps)))


def _hover(row: RatioRow, i: int) -> str:
    if row.ratio[i] is None:
        return f"{row.layer}<br>not adapted"
    held = f"<br>limited by {row.bound[i]}" if row.bound[i] else ""
    norms = (
        f"<br>|weights| {_number(row.weight_norm[i])}, |update| {_number(row.update_norm[i])}"
        if row.weight_norm[i] is not None
        else ""
    )
    return f"{row.layer}<br>ratio {_number(row.ratio[i])}{norms}{held}"


def _round_steps(steps: Sequence[int], most: int = 9) -> list[int]:
    """Return the indices of the first step and of at most `most` steps that are multiples of a round number."""
    sizes = (number * 10**power for power in range(9) for number in (1, 2, 5))
    size = next(size for size in sizes if len({step for step in steps if step % size == 0}) <= most)
    places = [i for i, step in enumerate(steps) if step % size == 0]
    first = [] if places and places[0] < len(steps) / (2 * most) else [0]
    return [*first, *places]


def _map_axes(info: LayersInfo, place: list[float], height: int) -> dict[str, Any]:
    shown = _round_steps(info.steps)
    pixels = (height - _TOP - _BOTTOM) / len(info.rows)
    rows = range(0, len(info.rows), max(1, math.ceil(_LEAST_ROW / pixels)))
    return {
        "xaxis": theme.axis(
            "step", domain=place, anchor="y", showgrid=False, tickvals=shown,
            ticktext=[str(info.steps[i]) for i in shown], range=[-0.5, len(info.steps) - 0.5],
        ),
        "yaxis": theme.axis(
            anchor="x", showgrid=False, range=[len(info.rows) - 0.5, -0.5], tickvals=list(rows),
            ticktext=[info.rows[j].layer for j in rows], tickfont={"size": max(9.0, min(10.5, 0.9 * pixels))},
        ),
    }  # fmt: skip


def _debts(info: LayersInfo) -> list[Any]:
    """Return the residual lines, grey lines first so that coloured lines are on top."""
    named = list(dict.fromkeys(debt.layer for debt in info.debts if debt.is_checked))[:MOST_NAMED]
    lines = [_line(debt, named) for debt in reversed(info.debts)]
    return sorted(lines, key=lambda line: bool(line["line"]["color"] != theme.AXIS))


def _line(debt: Debt, named: Sequence[str]) -> dict[str, Any]:
    checked = "" if debt.is_checked else "; small gradient, not checked"
    is_named = debt.is_checked and debt.layer in named
    colour = COLOURS[named.index(debt.layer)] if is_named else theme.AXIS
    return {
        "type": "scatter", "mode": "lines", "xaxis": "x2", "yaxis": "y2", "x": debt.steps, "y": debt.relative,
        "name": debt.layer, "showlegend": is_named and debt.kind != "share",
        "legendrank": named.index(debt.layer) + 1 if is_named else 1000,
        "line": {"color": colour, "width": 2.1 if is_named else 1.1, "dash": KIND_DASHES.get(debt.kind, "dash")},
        "opacity": 1.0 if debt.is_checked else 0.6,
        "customdata": debt.residuals,
        "hovertemplate": f"{debt.layer} ({debt.kind}{checked})<br>step %{{x}}: %{{y:.3g}} gradients, norm "
        "%{customdata:.3g}<extra></extra>",
    }  # fmt: skip


def _debt_axes(info: LayersInfo, place: list[float]) -> dict[str, Any]:
    known = [value for debt in info.debts for value in debt.relative if value]
    low, high = (min(known), max(known)) if known else (0.1, 1.0)
    top = max(high, LATE) * 1.5
    return {
        "xaxis2": theme.axis("step", domain=place, anchor="y2"),
        "yaxis2": theme.axis(
            anchor="x2", type="log", range=[math.log10(max(low / 1.5, top / 1e5)), math.log10(top)], dtick=1,
            tickformat="~g",
        ),
    }  # fmt: skip


def _late_note(info: LayersInfo) -> dict[str, Any]:
    place = {"xref": "x2 domain", "yref": "y2", "xanchor": "left", "font": {"size": 11, "color": theme.GREY}}
    is_partial = not all(debt.is_checked for debt in info.debts)
    return (
        theme.note("alarm (coloured)" if is_partial else "alarm threshold", x=0.01, y=math.log10(LATE))
        | place
    )


def layers_info_of_run(run: Any) -> LayersInfo:
    """Return the data of the figure of a `shardscope.Run`."""
    return layers_info(run.layers(), label=run.name)


def layers(run: Any) -> go.Figure:
    """Draw the trust ratios and compression residuals of a `shardscope.Run`, by layer."""
    return draw_layers(layers_info_of_run(run))
