"""Plans from a search: time against free memory, rejected layouts by reason, and a plan compared with the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil, floor, log10
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardscope.prediction.planner import REASONS, Plans, short
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.words import safe, seconds_text, three_digits

Spec = dict[str, Any]
GIB = 2**30
PIPELINE_COLOURS = ("#f2c14e", "#e58a3c", "#cf5b4f", "#a34a86", "#6f55b5", "#3f6fc4", "#2f93b8", "#1f9f8a")
"""Colours by logarithm of the pipeline degree; they also differ in brightness, and hover text gives the degree."""
TIME_LOOKS = {
    "compute": RunStyle("#2a6fb5"),
    "recompute": RunStyle("#88b9d8", pattern="."),
    "tensor_comm": RunStyle("#e06c2c", pattern="/"),
    "context_comm": RunStyle("#c49a0c", pattern="-"),
    "expert_comm": RunStyle("#a35a3a", pattern="x"),
    "pipeline_comm": RunStyle("#d9c36a", pattern="-"),
    "bubble": RunStyle("#8b8f99"),
    "data_comm": RunStyle("#b866a6", pattern="\\"),
    "optimizer": RunStyle("#11997a"),
    "offload": RunStyle("#5f6fd6", pattern="x"),
    "overhead": RunStyle("#a7abb4", pattern="."),
}
TIME_NAMES = {
    "tensor_comm": "tensor collectives",
    "context_comm": "context collectives",
    "expert_comm": "expert all-to-all",
    "pipeline_comm": "stage to stage",
    "data_comm": "gradients and gathering",
    "recompute": "recomputation",
}
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


class PlanPoint(NamedTuple):
    """One layout in the scatter plot."""

    kept: int
    """Index of the layout among the rows that the search kept."""
    time_s: float
    headroom_gib: float
    pipeline: int
    dollars: float | None
    label: str


class PlansInfo(NamedTuple):
    """Data of the scatter plot."""

    points: tuple[PlanPoint, ...]
    front: tuple[int, ...]
    """Indices of the Pareto-optimal points in `points`, fastest first."""
    capacity_gib: float


class TermsInfo(NamedTuple):
    """Breakdown of several plans: seconds per step by part, and GiB per device by kind of memory."""

    names: tuple[str, ...]
    seconds: tuple[Mapping[str, float], ...]
    gib: tuple[Mapping[str, float], ...]
    capacity_gib: float


def plans_info(plans: Plans, *, most: int = 600) -> PlansInfo:
    """Return the whole Pareto front and the best of the other kept layouts, at most `most` points in total."""
    front = plans.front_rows.tolist()
    others = [row for row in plans.order.tolist() if row not in set(front)][: max(0, most - len(front))]
    rows = [plans.row(kept, rank=1) for kept in [*front, *others]]
    points = tuple(
        PlanPoint(
            kept, row.time_s, row.headroom_bytes / GIB, row.layout.pipeline, row.dollars, short(row.layout)
        )
        for kept, row in zip([*front, *others], rows, strict=True)
    )
    return PlansInfo(points, tuple(range(len(front))), plans.setting.cluster.device.memory_bytes / GIB)


def terms_info(plans: Plans, ranks: Sequence[int]) -> TermsInfo:
    """Return the time and memory breakdown of some plans.

    Args:
        plans: Result of the search.
        ranks: Positions of the plans in the ranking, from 1; duplicates are dropped.
    """
    from shardscope.analytic.layouts import Layouts
    from shardscope.prediction.planner.search import memory_parts, time_of

    ranks = tuple(dict.fromkeys(ranks))
    table = Layouts.of([plans.layout(int(plans.order[rank - 1])) for rank in ranks])
    times, memory = time_of(plans.setting, table), memory_parts(plans.setting, table)
    return TermsInfo(
        tuple(f"plan {rank}" for rank in ranks),
        tuple({part: float(getattr(times, part)[row]) for part in TIME_LOOKS} for row in range(len(ranks))),
        tuple({kind: float(getattr(memory, kind)[row]) / GIB for kind in KINDS} for row in range(len(ranks))),
        plans.setting.cluster.device.memory_bytes / GIB,
    )


def plans_text(plans: Plans) -> str:
    """Describe the result of the search in words."""
    if not len(plans):
        return plans.problem
    best, fits = plans[0], plans.valid - plans.rejected.get("does not fit", 0)
    dollars = "" if best.dollars is None else f", ${three_digits(best.dollars)} per step"
    return (
        f"{plans.valid:,} layouts are valid on {plans.setting.cluster.num_devices:,} devices and {fits:,} of them fit. "
        f"The best by this measure takes {seconds_text(best.time_s)} per step{dollars} and leaves "
        f"{best.headroom_bytes / GIB:.1f} GiB free: {short(best.layout)}."
    )


def scatter(info: PlansInfo) -> Spec:
    """Return the scatter plot of `info` with its Pareto front as Plotly JSON.

    The time axis ends at four times the fastest time. Add `rings` to mark plans.
    """
    times = [point.time_s for point in info.points] or [1.0]
    view = [log10(min(times) / 1.03), log10(max(1.1 * min(times), min(1.05 * max(times), 4 * min(times))))]
    layout = _scatter_layout()
    layout = layout | {"xaxis": layout["xaxis"] | {"range": view, "autorange": False, **_ticks(view)}}
    return {
        "data": [_front(info), *(_dots(info, degree) for degree in _degrees(info))],
        "layout": layout,
    }


def _ticks(view: list[float]) -> dict[str, Any]:
    """Return tick settings of a logarithmic axis, at round values."""
    decades = range(floor(view[0]), ceil(view[1]) + 1)
    values = [step * 10.0**decade for decade in decades for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7)]
    seen = [value for value in values if view[0] <= log10(value) <= view[1]]
    return {"tickvals": seen, "ticktext": [f"{value:g}" for value in seen]}


def rings(info: PlansInfo, *, best: int | None = None, chosen: int | None = None) -> list[dict[str, Any]]:
    """Return rings around the best and the chosen layout; `best` and `chosen` are indices among the kept rows."""
    points = {point.kept: point for point in info.points}
    marks = ((best, "star-open", "best"), (chosen, "circle-open", "chosen"))
    return [_ring(points[kept], symbol, name) for kept, symbol, name in marks if kept in points]


def _degrees(info: PlansInfo) -> list[int]:
    return sorted({point.pipeline for point in info.points})


def _front(info: PlansInfo) -> dict[str, Any]:
    path = [info.points[place] for place in info.front]
    return {
        "type": "scatter", "x": [point.time_s for point in path], "y": [point.headroom_gib for point in path],
        "mode": "lines", "line": {"color": theme.GREY, "width": 1.2, "shape": "hv", "dash": "dot"},
        "hoverinfo": "skip", "name": "front",
    }  # fmt: skip


@cache
def _scatter_layout() -> dict[str, Any]:
    figure = theme.style(go.Figure(), height=390, margin={"l": 8, "r": 12, "t": 14, "b": 8})
    figure.update_layout(
        xaxis=theme.axis("seconds per step (logarithmic)", type="log"),
        yaxis=theme.axis("free GiB on the fullest device"),
        legend={"orientation": "v", "x": 1.01, "y": 1, "yanchor": "top", "itemsizing": "constant"},
    )  # fmt: skip
    return dict(figure.to_plotly_json()["layout"])


def _dots(info: PlansInfo, degree: int) -> dict[str, Any]:
    points = [point for point in info.points if point.pipeline == degree]
    cheapest = min((point.dollars for point in info.points if point.dollars), default=1.0)
    on_front = {info.points[place].kept for place in info.front}
    colour = PIPELINE_COLOURS[min(degree.bit_length() - 1, len(PIPELINE_COLOURS) - 1)]
    return {
        "type": "scatter", "x": [point.time_s for point in points], "y": [point.headroom_gib for point in points],
        "mode": "markers", "name": f"{degree} stage{'s' * (degree > 1)}",
        "marker": {
            "color": colour,
            "size": [_size(point, cheapest) for point in points],
            "opacity": [1.0 if point.kept in on_front else 0.6 for point in points],
            "line": {"width": [1.2 if point.kept in on_front else 0 for point in points], "color": theme.GREY},
        },
        "customdata": [point.kept for point in points],
        "text": [_hover(point) for point in points], "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _size(point: PlanPoint, cheapest: float) -> float:
    return 9.0 if point.dollars is None else 8.0 * min(4.0, point.dollars / cheapest) ** 0.5


def _hover(point: PlanPoint) -> str:
    dollars = "" if point.dollars is None else f", ${three_digits(point.dollars)}"
    label = "<br>".join(_lines(point.label.split(" · "), 4))
    return (
        f"<b>{seconds_text(point.time_s)}</b> per step{dollars}, {point.headroom_gib:.1f} GiB free<br>{label}"
    )


def _lines(parts: list[str], width: int) -> list[str]:
    return [safe(" · ".join(parts[at : at + width])) for at in range(0, len(parts), width)]


def _ring(point: PlanPoint, symbol: str, name: str) -> dict[str, Any]:
    return {
        "type": "scatter", "x": [point.time_s], "y": [point.headroom_gib], "mode": "markers", "name": name,
        "hoverinfo": "skip", "marker": {"symbol": symbol, "size": 20, "color": "#c5372c", "line": {"width": 2.4}},
    }  # fmt: skip


def plans(found: Plans) -> go.Figure:
    """Draw time against free memory for the best layouts and the Pareto front, coloured by pipeline degree."""
    info = plans_info(found)
    spec = scatter(info)
    return go.Figure(spec).add_traces(rings(info, best=int(found.order[0]) if len(found) else None))


def terms(info: TermsInfo) -> Spec:
    """Return stacked bars of the time and memory of some plans, with the device capacity, as Plotly JSON."""
    longest = max(sum(each.values()) for each in info.seconds)
    data = [
        _stack("", TIME_NAMES.get(part, part), values, info.names, look, "s")
        for part, look in TIME_LOOKS.items()
        if max(values := [each[part] for each in info.seconds]) > 0.002 * longest
    ]
    data += [
        _stack("2", kind, [each[kind] for each in info.gib], info.names, theme.MEMORY_LOOKS[kind], "GiB")
        for kind in KINDS
    ]
    line = {
        "type": "line", "xref": "x2", "yref": "paper", "x0": info.capacity_gib, "x1": info.capacity_gib,
        "y0": 0, "y1": 1, "line": {"color": "#c5372c", "width": 1.6, "dash": "dash"},
    }  # fmt: skip
    layout, height = _terms_layout(), 174 + 44 * len(info.names)
    title, text = layout["xaxis2"]["title"], f"GiB per device; dashed: capacity, {info.capacity_gib:.0f}"
    return {
        "data": data,
        "layout": layout
        | {
            "height": height,
            "shapes": [line],
            "xaxis2": layout["xaxis2"] | {"title": title | {"text": text}},
        },
    }


@cache
def _terms_layout() -> dict[str, Any]:
    figure = theme.style(
        make_subplots(rows=1, cols=2, horizontal_spacing=0.1), height=200, barmode="stack", bargap=0.3
    )
    rows = {"autorange": "reversed", "showgrid": False, "automargin": True}
    key = {
        "orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "font": {"size": 11},
        "traceorder": "normal",
    }  # fmt: skip
    figure.update_layout(
        margin={"l": 8, "r": 12, "t": 64, "b": 88},
        legend=key | {"y": 1, "yanchor": "top", "title": {"text": "time  "}},
        legend2=key | {"y": 0, "yanchor": "bottom", "title": {"text": "memory  "}},
        xaxis=theme.axis("seconds per step", rangemode="tozero"), xaxis2=theme.axis(rangemode="tozero"),
        yaxis=rows, yaxis2=rows,
    )  # fmt: skip
    return dict(figure.to_plotly_json()["layout"])


def _stack(  # noqa: PLR0917
    axis: str, name: str, values: list[float], rows: tuple[str, ...], look: RunStyle, unit: str
) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "x": values, "y": list(rows), "name": name,
        "xaxis": f"x{axis}", "yaxis": f"y{axis}", "hovertemplate": f"{name}: %{{x:.3g}} {unit}<extra>%{{y}}</extra>",
        "legend": f"legend{axis}",
        "marker": {"color": look.colour, "pattern": {"shape": look.pattern, "fgcolor": "rgba(255,255,255,.55)"}},
    }  # fmt: skip


def plan_terms(found: Plans, *ranks: int) -> go.Figure:
    """Draw the time and memory breakdown of some plans.

    Args:
        found: Result of the search.
        ranks: Positions of the plans in the ranking, from 1; the best plan by default.
    """
    return go.Figure(terms(terms_info(found, ranks or (1,))))


def rejected(counts: Mapping[str, int]) -> Spec:
    """Return bars with the number of rejected combinations by reason, on a logarithmic axis, as Plotly JSON."""
    names = list(counts)
    bars = {
        "type": "bar", "orientation": "h", "x": [counts[name] for name in names], "y": names,
        "marker": {"color": [_REASON_COLOURS.get(name, theme.GREY) for name in names]},
        "text": [f"{counts[name]:,}" for name in names], "textposition": "outside", "cliponaxis": False,
        "customdata": [REASONS[name] for name in names], "hovertemplate": "%{x:,}: %{customdata}<extra></extra>",
    }  # fmt: skip
    return {"data": [bars], "layout": _rejected_layout() | {"height": 60 + 22 * len(names)}}


@cache
def _rejected_layout() -> dict[str, Any]:
    figure = theme.style(go.Figure(), height=60, margin={"l": 8, "r": 80, "t": 8, "b": 8}, showlegend=False)
    figure.update_layout(
        xaxis=theme.axis("combinations (logarithmic)", type="log"),
        yaxis={"autorange": "reversed", "showgrid": False, "automargin": True},
    )
    return dict(figure.to_plotly_json()["layout"])


_REASON_COLOURS = {"does not fit": "#c5372c", "beaten": "#2a86d1"}


def plan_rejections(found: Plans) -> go.Figure:
    """Draw the number of rejected combinations by reason."""
    return go.Figure(rejected(found.rejected))


def table_rows(found: Plans, count: int = 15) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the first `count` plans as a table, without columns that are empty in all of them."""
    header = ("", "step", "tokens/s", "$ / step", "GiB free", "dp", "tp", "pp", "cp", "ep", "ZeRO", "schedule",
              "micro", "recompute", "offload", "compression")  # fmt: skip
    rows = [_cells(found, place) for place in range(min(count, len(found)))]
    told = [place for place in range(len(header)) if any(row[place] for row in rows)]
    return [header[place] for place in told], [[row[place] for place in told] for row in rows]


def _cells(found: Plans, place: int) -> list[str]:
    plan = found[place]
    layout = plan.layout
    zero = f"{layout.zero} over {layout.shard}" if layout.shard else str(layout.zero)
    schedule: str = "" if layout.pipeline == 1 else layout.schedule
    if schedule and PipelineSchedule(layout.schedule).most_stages is None:
        schedule = f"{schedule} ×{layout.virtual_stages}"
    dollars = "" if plan.dollars is None else three_digits(plan.dollars)
    cells = [
        plan.rank, _seconds(plan.time_s), f"{plan.tokens_per_s:,.0f}", dollars, f"{plan.headroom_bytes / GIB:.1f}",
        layout.data, f"{layout.tensor}{' sp' * layout.sequence_parallel}", layout.pipeline, layout.context,
        layout.expert if found.setting.model.mixture else "", zero, schedule,
        layout.micro_batch, layout.recompute, layout.offload, layout.axis("compression"),
    ]  # fmt: skip
    return ["" if cell == "none" else str(cell) for cell in cells]


def _seconds(value: float) -> str:
    """Format seconds with four significant digits, so that adjacent rows of the table differ."""
    return f"{value:.4g} s" if value >= 1 else f"{1e3 * value:.4g} ms"
