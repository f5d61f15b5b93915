"""Plans from a search: time against free memory, rejected layouts by reason, and a plan compared with the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import log10
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardscope.planner import REASONS, Plans, short
from shardscope.planner.explain import seconds
from shardscope.planner.setting import capacity
from shardscope.planner.table import dollars_text
from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.words import safe, three_digits

Spec = dict[str, Any]
GIB = 2**30
STAGE_LOOKS = (
    ("#f2d13c", "circle"), ("#9fcf45", "square"), ("#4fb96d", "diamond"), ("#1f9e89", "triangle-up"),
    ("#2b7f9e", "cross"), ("#4a63b0", "x"), ("#7a4bb0", "star"), ("#a3369a", "triangle-down"),
)  # fmt: skip
"""Colour and symbol by base-2 logarithm of the pipeline degree; the symbol alone identifies the degree."""
NEAR = 0.01
"""Offset added to the relative excess over the fastest time, so that a logarithmic axis can show the fastest layout."""
_TICKS = (0, 0.03, 0.1, 0.3, 1, 3, 9)
REASON_NAMES = {
    "devices": "degrees do not divide device count",
    "data": "number of replicas not allowed",
    "heads": "tensor degree does not divide the heads",
    "kv-heads": "tensor degree does not suit key-value heads",
    "ffn": "tensor degree does not divide the feed-forward layer",
    "layers": "more stages than layers",
    "sequence": "context degree does not divide the sequence",
    "experts": "experts or replicas do not divide evenly",
    "batch": "replicas do not divide the batch",
    "micro-batch": "micro-batch does not divide the batch",
    "schedule": "schedule does not suit this layout",
    "no pipeline": "duplicate: no pipeline to schedule",
    "sequence-parallel": "sequence parallelism not possible",
    "ZeRO in a pipeline": "framework does not support pipelines with this ZeRO stage",
    "ZeRO with offload": "framework does not offload with this ZeRO stage",
    "recomputation with offload": "framework offloads inputs of recomputed layers only",
    "no replicas": "duplicate: nothing to shard over",
    "no recomputation": "duplicate: nothing to recompute",
    "recompute-layers": "duplicate: same number of recomputed layers",
    "no job": "no job has this combination of settings",
    "does not fit": "does not fit in memory",
    "not timed": "step time not predicted",
    "beaten": "worse in both time and memory",
}
"""Reasons of the planner as labels of the bars."""
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
    "pipeline_comm": "pipeline transfers",
    "data_comm": "gradient reduction and gathering",
    "recompute": "recomputation",
}
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


class PlanPoint(NamedTuple):
    """One layout in the scatter plot."""

    kept: int
    """Index of the layout among the layouts that the search kept."""
    time_s: float
    headroom_gib: float
    pipeline: int
    dollars: float | None
    label: str


class PlansInfo(NamedTuple):
    """Layouts in the scatter plot, with the subset that forms the Pareto front."""

    points: tuple[PlanPoint, ...]
    front: tuple[int, ...]
    """Indices of the Pareto-optimal points in `points`, fastest first."""
    capacity_gib: float


class TermsInfo(NamedTuple):
    """Breakdown of several plans: seconds per step by part, and GiB per device by type of memory."""

    names: tuple[str, ...]
    seconds: tuple[Mapping[str, float], ...]
    gib: tuple[Mapping[str, float], ...]
    capacity_gib: float


def plans_info(plans: Plans, *, most: int = 600) -> PlansInfo:
    """Return the whole Pareto front and the best remaining layouts, up to `most` points in total."""
    front = plans.front_rows.tolist()
    others = [row for row in plans.order.tolist() if row not in set(front)][: max(0, most - len(front))]
    rows = [plans.row(kept, rank=1) for kept in [*front, *others]]
    points = tuple(
        PlanPoint(
            kept,
            row.step_time_s,
            row.headroom_bytes / GIB,
            row.layout.pipeline,
            row.dollars,
            short(row.layout),
        )
        for kept, row in zip([*front, *others], rows, strict=True)
    )
    return PlansInfo(points, tuple(range(len(front))), capacity(plans.setting) / GIB)


def terms_info(plans: Plans, ranks: Sequence[int]) -> TermsInfo:
    """Return the time and memory breakdown of some plans.

    Args:
        plans: Result of the search.
        ranks: Positions of the plans in the ranking, from 1; duplicates are dropped.
    """
    from shardscope.analytic.layouts import Layouts
    from shardscope.planner.setting import memory_parts, time_of

    ranks = tuple(dict.fromkeys(ranks))
    layouts = [plans.ranked(rank) for rank in ranks]
    asked = [(plans.asked.setting(layout), Layouts.of([layout])) for layout in layouts]
    times, memory = [time_of(*each) for each in asked], [memory_parts(*each) for each in asked]
    return TermsInfo(
        tuple(f"plan {rank}" for rank in ranks),
        tuple({part: float(getattr(each, part)[0]) for part in TIME_LOOKS} for each in times),
        tuple({kind: float(getattr(each, kind)[0]) / GIB for kind in KINDS} for each in memory),
        capacity(plans.setting) / GIB,
    )


def scatter(info: PlansInfo) -> Spec:
    """Return the scatter plot of `info` with its Pareto front as Plotly JSON.

    The time axis ends at four times the fastest time, and is stretched near the fastest time. Add `rings` to mark
    plans.
    """
    times = [point.time_s for point in info.points] or [1.0]
    fastest, slowest = min(times), min(max(1.05 * max(times), 1.1 * min(times)), 4 * min(times))
    view = [log10(0.7 * NEAR), log10(1.1 * _place(slowest, fastest))]
    layout = _scatter_layout()
    layout = layout | {"xaxis": layout["xaxis"] | {"range": view, "autorange": False, **_ticks(fastest)}}
    return {
        "data": [_front(info), *(_dots(info, degree) for degree in _degrees(info))],
        "layout": layout,
    }


def _place(time_s: float, fastest: float) -> float:
    """Return the position of a step time on the logarithmic axis: its relative excess over the fastest, plus `NEAR`."""
    return time_s / fastest - 1 + NEAR


def _fastest(info: PlansInfo) -> float:
    return min((point.time_s for point in info.points), default=1.0)


def _ticks(fastest: float) -> dict[str, Any]:
    """Return tick settings of the time axis: step times at round distances from the fastest."""
    unit, name = (60.0, "min") if fastest >= 600 else (1.0, "s") if fastest >= 1 else (1e-3, "ms")
    texts = [
        f"{three_digits(fastest * (1 + excess) / unit)} {name}<br>{f'+{excess:.0%}' if excess else 'fastest'}"
        for excess in _TICKS
    ]
    return {"tickvals": [excess + NEAR for excess in _TICKS], "ticktext": texts, "tickangle": 0}


def rings(info: PlansInfo, *, best: int | None = None, chosen: int | None = None) -> list[dict[str, Any]]:
    """Return rings around the best and the chosen layout; `best` and `chosen` are indices among the kept rows."""
    points = {point.kept: point for point in info.points}
    marks = ((best, "star-open", "plan 1"), (chosen, "circle-open", "chosen"))
    fastest = _fastest(info)
    return [_ring(points[kept], symbol, name, fastest) for kept, symbol, name in marks if kept in points]


def _degrees(info: PlansInfo) -> list[int]:
    return sorted({point.pipeline for point in info.points})


def _front(info: PlansInfo) -> dict[str, Any]:
    path, fastest = [info.points[place] for place in info.front], _fastest(info)
    return {
        "type": "scatter", "x": [_place(point.time_s, fastest) for point in path],
        "y": [point.headroom_gib for point in path],
        "mode": "lines", "line": {"color": theme.GREY, "width": 1.2, "shape": "hv", "dash": "dot"},
        "hoverinfo": "skip", "name": "Pareto front",
    }  # fmt: skip


@cache
def _scatter_layout() -> dict[str, Any]:
    figure = theme.style(go.Figure(), height=410, margin={"l": 8, "r": 12, "t": 52, "b": 8})
    figure.update_layout(
        xaxis=theme.axis("step time and excess over the fastest plan (log scale)", type="log"),
        yaxis=theme.axis("free memory per device, GiB"),
        legend=theme.LEGEND_ABOVE | {"itemsizing": "constant"},
    )  # fmt: skip
    return dict(figure.to_plotly_json()["layout"])


def _dots(info: PlansInfo, degree: int) -> dict[str, Any]:
    points = [point for point in info.points if point.pipeline == degree]
    cheapest = min((point.dollars for point in info.points if point.dollars), default=1.0)
    on_front, fastest = {info.points[place].kept for place in info.front}, _fastest(info)
    colour, symbol = STAGE_LOOKS[min(degree.bit_length() - 1, len(STAGE_LOOKS) - 1)]
    return {
        "type": "scatter", "x": [_place(point.time_s, fastest) for point in points],
        "y": [point.headroom_gib for point in points],
        "mode": "markers", "name": f"{degree} stage{'s' * (degree > 1)}",
        "marker": {
            "color": colour, "symbol": symbol,
            "size": [_size(point, cheapest) for point in points],
            "opacity": [1.0 if point.kept in on_front else 0.65 for point in points],
            "line": {"width": [1.4 if point.kept in on_front else 0.4 for point in points], "color": theme.GREY},
        },
        "customdata": [point.kept for point in points],
        "text": [_hover(point) for point in points], "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _size(point: PlanPoint, cheapest: float) -> float:
    return 9.0 if point.dollars is None else 8.0 * min(4.0, point.dollars / cheapest) ** 0.5


def _hover(point: PlanPoint) -> str:
    dollars = "" if point.dollars is None else f", {dollars_text(point.dollars)}"
    label = "<br>".join(_lines(point.label.split(" · "), 4))
    return f"<b>{seconds(point.time_s)}</b> per step{dollars}, {point.headroom_gib:.1f} GiB free<br>{label}"


def _lines(parts: list[str], width: int) -> list[str]:
    return [safe(" · ".join(parts[at : at + width])) for at in range(0, len(parts), width)]


def _ring(point: PlanPoint, symbol: str, name: str, fastest: float) -> dict[str, Any]:
    return {
        "type": "scatter", "x": [_place(point.time_s, fastest)], "y": [point.headroom_gib],
        "mode": "markers", "name": name,
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
    layout, height = _terms_layout(), 174 + 44 * len(info.names)
    title, text = layout["xaxis2"]["title"], f"GiB per device ({info.capacity_gib:.1f} for tensors)"
    return {
        "data": data,
        "layout": layout
        | {
            "height": height,
            "shapes": [theme.rule("#c5372c", x=info.capacity_gib, axis="2", along="y2 domain")],
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
        "marker": theme.striped(look),
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
        "type": "bar", "orientation": "h", "x": [counts[name] for name in names],
        "y": [f"{REASON_NAMES[name]} " for name in names],
        "marker": {"color": [_REASON_COLOURS.get(name, theme.GREY) for name in names]},
        "text": [f"{counts[name]:,}" for name in names], "textposition": "outside", "cliponaxis": False,
        "customdata": [REASONS[name] for name in names], "hovertemplate": "%{x:,}: %{customdata}<extra></extra>",
    }  # fmt: skip
    layout = _rejected_layout()
    ends = [
        log10(0.7),
        log10(max(counts.values(), default=1)) + 0.3,
    ]  # so that a single layout has a bar, too
    return {
        "data": [bars],
        "layout": layout | {"height": 60 + 22 * len(names), "xaxis": layout["xaxis"] | {"range": ends}},
    }


@cache
def _rejected_layout() -> dict[str, Any]:
    figure = theme.style(go.Figure(), height=60, margin={"l": 8, "r": 80, "t": 8, "b": 8}, showlegend=False)
    figure.update_layout(
        xaxis=theme.axis("number of layouts left out (log scale)", type="log", dtick=2, tickangle=0),
        yaxis={"autorange": "reversed", "showgrid": False, "automargin": True},
    )
    return dict(figure.to_plotly_json()["layout"])


_REASON_COLOURS = {"does not fit": "#c5372c", "beaten": "#2a86d1"}


def plan_rejections(found: Plans) -> go.Figure:
    """Draw the number of rejected combinations by reason."""
    return go.Figure(rejected(found.rejected))
