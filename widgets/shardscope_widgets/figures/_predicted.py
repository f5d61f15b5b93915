"""Bar charts of predicted and measured values: bytes, memory and time of one run, and step times of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import plotly.graph_objects as go

from shardscope.measure.compare.comparison import error_text, heading_of, repeats, shown_columns, value_text
from shardscope.measure.compare.measured import REST
from shardscope.measure.compare.residual import by_axis
from shardscope.spec.units import suitable_unit
from shardscope_widgets.figures import theme
from shardscope_widgets.words import duration_text

if TYPE_CHECKING:
    from shardscope.measure.compare.comparison import ComparedTerm, Comparison

_GROUPS = ("bytes", "memory", "time")
LOOKS: Mapping[str, theme.RunStyle] = {
    "predicted": theme.RunStyle("#c9a227", pattern="/"),
    "now": theme.RunStyle("#8b8f99", pattern="x"),
    "simulated": theme.RunStyle("#11997a", pattern="."),
    "measured": theme.RunStyle("#2a6fb5"),
}
_ROW, _HEADING, _AXIS = 30, 40, 34
"""Heights of a term, a panel heading and a panel axis, in pixels."""
_STEP_ROW, _STEP_FRAME = 26, 92


class ComparedPanel(NamedTuple):
    """One group of terms in a common unit, with errors as text."""

    title: str
    unit: str
    terms: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]]
    """Values in `unit` by column: ``predicted``, ``measured``, and ``simulated`` if the run was simulated."""
    errors: tuple[str, ...]
    hover: Mapping[str, tuple[str, ...]]
    """Values as text, each with a suitable unit, by column."""


class ComparedInfo(NamedTuple):
    """The panels of one comparison; groups without terms are omitted."""

    label: str
    panels: tuple[ComparedPanel, ...]


def compared_info(comparison: Comparison) -> ComparedInfo:
    """Return the bars of a comparison.

    Message counts, sums and the times of individual collectives are omitted; the table has them. On a mesh, each axis
    has a bar for all of its collectives.
    """
    found = {group: [row for row in comparison.rows if row.group == group] for group in _GROUPS}
    panels = [_panel(comparison, kept) for rows in found.values() if (kept := _kept(rows))]
    return ComparedInfo(comparison.label, tuple(panels))


def _kept(rows: list[ComparedTerm]) -> list[ComparedTerm]:
    return [row for row in by_axis(rows) if row.term not in {"all collectives", REST}]


def _panel(comparison: Comparison, rows: list[ComparedTerm]) -> ComparedPanel:
    columns = shown_columns(rows)
    by_column = {name: [getattr(row, name) for row in rows] for name in columns}
    if "simulated" in by_column:
        by_column["simulated"] = [None if repeats(row) else row.simulated for row in rows]
    largest = max(value or 0.0 for values in by_column.values() for value in values)
    size, unit = suitable_unit(largest, rows[0].unit)
    return ComparedPanel(
        heading_of(rows[0].group, comparison.per),
        unit,
        tuple(row.term for row in rows),
        {name: tuple((value or 0.0) / size for value in values) for name, values in by_column.items()},
        tuple(map(error_text, rows)),
        {
            name: tuple(value_text(value, rows[0].unit) for value in values)
            for name, values in by_column.items()
        },
    )


def compared(comparison: Comparison) -> go.Figure:
    """Draw the measured and predicted terms of a run side by side, with the error of each term.

    Example:
        >>> compared(ss.compare(run))  # doctest: +SKIP
    """
    info = compared_info(comparison)
    figure = go.Figure()
    heights = [_HEADING + _ROW * len(panel.terms) + _AXIS for panel in info.panels]
    total, top = max(sum(heights), 1), 0
    for number, (panel, height) in enumerate(zip(info.panels, heights, strict=True), start=1):
        ends = [1 - (top + height - _AXIS) / total, 1 - (top + _HEADING) / total]
        _add_panel(figure, panel, number, ends)
        top += height
    legend = theme.LEGEND_ABOVE | {"traceorder": "normal"}
    margin = {"l": 8, "r": 92, "t": 26, "b": 4}
    return theme.style(figure, height=total + 30, legend=legend, margin=margin, bargap=0.28, bargroupgap=0.06)


def _add_panel(figure: go.Figure, panel: ComparedPanel, number: int, ends: list[float]) -> None:
    suffix = "" if number == 1 else str(number)
    known = {trace.legendgroup for trace in figure.data}
    for name, values in panel.values.items():
        figure.add_trace(_bars(panel, name, values, suffix, is_first=name not in known))
    x_axis = theme.axis(
        anchor=f"y{suffix}", ticksuffix=f" {panel.unit}", rangemode="tozero", nticks=5, tickangle=0
    )
    y_axis = theme.axis(
        anchor=f"x{suffix}",
        domain=ends,
        autorange="reversed",
        showgrid=False,
        type="category",
        fixedrange=True,
    )
    figure.update_layout({f"xaxis{suffix}": x_axis, f"yaxis{suffix}": y_axis})
    figure.add_annotation(theme.note(f"<b>{panel.title}</b>", x=0, y=ends[1]) | {"yshift": 5})
    for term, error in zip(panel.terms, panel.errors, strict=True):
        figure.add_annotation(
            theme.note(error, x=1, y=0)
            | {"y": term, "yref": f"y{suffix}", "xanchor": "right", "yanchor": "middle", "xshift": 88,
               "font": {"size": 12, "color": theme.GREY}}
        )  # fmt: skip


def _bars(
    panel: ComparedPanel, name: str, values: tuple[float, ...], suffix: str, *, is_first: bool
) -> dict[str, Any]:
    look = LOOKS[name]
    return {
        "type": "bar",
        "orientation": "h",
        "x": list(values),
        "y": list(panel.terms),
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "name": "predicted now" if name == "now" else name,
        "legendgroup": name,
        "showlegend": is_first,
        "marker": theme.striped(look, size=5, solidity=0.25),
        "customdata": list(panel.hover[name]),
        "hovertemplate": f"%{{y}}, {name}: %{{customdata}}<extra></extra>",
    }


class StepTimesRow(NamedTuple):
    """One job: its name, and its step times in seconds; None for unknown times."""

    label: str
    predicted: float | None
    simulated: float | None = None
    measured: float | None = None


def step_times(rows: Sequence[StepTimesRow]) -> go.Figure:
    """Draw a bar for each known step time, grouped by job in the order of `rows`.

    Example:
        >>> step_times([StepTimesRow("ring", ss.predict(job).step_time_s)])  # doctest: +SKIP
    """
    columns = [name for name in LOOKS if any(getattr(row, name, None) is not None for row in rows)]
    figure = go.Figure([_step_bars(rows, name) for name in columns])
    figure.update_layout(
        xaxis=theme.axis(tickformat="~s", ticksuffix="s", rangemode="tozero", nticks=6),
        yaxis=theme.axis(
            autorange="reversed", type="category", showgrid=False, fixedrange=True, ticklabelstandoff=6
        ),
    )
    height = _STEP_FRAME + _STEP_ROW * max(1, len(columns)) * len(rows)
    return theme.style(
        figure, height=height, barmode="group", legend=theme.LEGEND_ABOVE, bargroupgap=0.06,
        margin={"l": 8, "r": 70, "t": 44, "b": 8},
    )  # fmt: skip


def _step_bars(rows: Sequence[StepTimesRow], name: str) -> go.Bar:
    values = [getattr(row, name) for row in rows]
    texts = ["" if value is None else f" {duration_text(value)}" for value in values]
    return go.Bar(
        x=values, y=[row.label for row in rows], orientation="h", name=name, text=texts, textposition="outside",
        textfont={"size": 11, "color": theme.GREY}, cliponaxis=False,
        marker=theme.striped(LOOKS[name], size=5, solidity=0.25),
        hovertemplate=f"<b>%{{y}}</b>, {name}:%{{text}}<extra></extra>",
    )  # fmt: skip
