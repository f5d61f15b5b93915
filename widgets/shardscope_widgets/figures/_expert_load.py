"""Load of each expert in the newest step of a run, and over its steps how uneven the load is, and what is dropped."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures._curves import MOST_POINTS
from shardscope_widgets.trace import Trace

IMBALANCE = "#2a86d1"
DROPPED = "#c5372c"
EVEN_UP_TO = 1.25
"""Imbalance up to which the text calls a load nearly even."""
_SCALE = ((0.0, "#1f5fa8"), (0.5, "#e8e4da"), (1.0, "#b3402e"))
"""Colours of loads below, at and above an even load, on a logarithmic scale."""
_LEFT, _RIGHT = [0.0, 0.42], [0.6, 1.0]
_LEAST = 2.0
"""The colours reach at least from 1/2 to 2 times an even load."""
_MOST = 8.0


class ExpertLoadInfo(NamedTuple):
    """Loads relative to an even load of the newest step, by layer and expert; and figures of steps."""

    label: str
    step: int
    layers: tuple[str, ...]
    loads: tuple[tuple[float, ...], ...]
    """Choices of each expert before drops, relative to an even load."""
    tokens: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    imbalance: tuple[float, ...]
    dropped: tuple[float, ...]
    """Fraction of the choices that were dropped, by step."""

    @property
    def busiest(self) -> tuple[float, str, int]:
        """Largest relative load, with the name of its layer and the number of its expert."""
        return max(
            (load, layer, expert)
            for layer, row in zip(self.layers, self.loads, strict=True)
            for expert, load in enumerate(row)
        )

    @property
    def drops(self) -> bool:
        """Whether any choice has been dropped."""
        return any(self.dropped)


def expert_load_info(trace: Trace) -> ExpertLoadInfo | None:
    """Return the data of the figure for a run so far; None if its model has no experts, or before its first step."""
    log = trace.experts
    if not log.newest:
        return None
    step = max(log.newest)
    assigned = log.newest[step].assigned
    steps = sorted(log.figures)
    steps = [*steps[:: max(1, math.ceil(len(steps) / MOST_POINTS))]]
    figures = [log.figures[each] for each in steps]
    return ExpertLoadInfo(
        label=trace.label,
        step=step,
        layers=log.layers,
        loads=tuple(tuple(count * len(row) / max(1, sum(row)) for count in row) for row in assigned),
        tokens=assigned,
        steps=tuple(steps),
        imbalance=tuple(each.imbalance for each in figures),
        dropped=tuple(each.dropped for each in figures),
    )


def expert_load_text(info: ExpertLoadInfo) -> str:
    """Return a sentence on the load of the newest step, and one on its change since the first."""
    load, layer, expert = info.busiest
    named = f"{info.label}: " if info.label else ""
    first, last = info.imbalance[0], info.imbalance[-1]
    parts = [
        f"{named}in step {info.step}, the busiest expert ({expert} of {layer}) gets {load:.2f} times an even load"
    ]
    if info.drops:
        parts.append(f"{info.dropped[-1]:.1%} of the routed tokens are dropped")
    if len(info.steps) > 1:
        is_even = last <= EVEN_UP_TO
        change = "fell" if last < first else "rose"
        parts.append(
            f"the busiest expert's load (mean over layers) {change} from {first:.2f} to {last:.2f}"
            + (", which is nearly even" if is_even else "")
        )
    return "; ".join(parts) + "."


def draw_expert_load(info: ExpertLoadInfo) -> go.Figure:
    """Draw the load of each expert by layer on the left, and imbalance and drops over the steps on the right."""
    figure = go.Figure([_map(info), *_lines(info)])
    height = max(230, 96 + 26 * len(info.layers))
    dropped = f"; <span style='color:{DROPPED}'>━ dropped</span>" if info.drops else ""
    figure.update_layout(
        xaxis=theme.axis("expert", domain=_LEFT, anchor="y", showgrid=False, dtick=_every(info), tick0=0),
        yaxis=theme.axis(anchor="x", autorange="reversed", showgrid=False, tickvals=[*range(len(info.layers))],
                         ticktext=[_short(name) for name in info.layers]),
        xaxis2=theme.axis("step", domain=_RIGHT, anchor="y2"),
        yaxis2=theme.axis(anchor="x2", range=[1, max(EVEN_UP_TO, *info.imbalance) * 1.06], nticks=6, ticksuffix="×"),
        yaxis3=theme.axis(overlaying="y2", side="right", anchor="x2", tickformat=".0%", tickmode="linear", tick0=0,
                          showgrid=False, dtick=_tick(info),
                          range=[0, max(0.05, *info.dropped) * 1.15], visible=info.drops),
        annotations=[
            theme.heading("Load of each expert", f"relative to an even load, in step {info.step}", x=_LEFT[0]),
            theme.heading(
                "Imbalance", f"<span style='color:{IMBALANCE}'>━ busiest expert</span>{dropped}",
                x=_RIGHT[0],
            ),
        ],
        showlegend=False,
    )  # fmt: skip
    return theme.style(figure, height=height, margin={"l": 8, "r": 12, "t": 52, "b": 8})


def _every(info: ExpertLoadInfo) -> int:
    return max(1, math.ceil(len(info.loads[0]) / 16))


def _tick(info: ExpertLoadInfo) -> float:
    """Return the distance of the ticks on the axis of dropped tokens."""
    most = max(0.05, *info.dropped)
    return next(step for step in (0.02, 0.05, 0.1, 0.2) if most <= 5 * step)


def _short(layer: str) -> str:
    """Return a layer's name without the module inside it that has the experts."""
    return layer.removesuffix(".ffn")


def _map(info: ExpertLoadInfo) -> go.Heatmap:
    end = math.log2(min(_MOST, max(_LEAST, info.busiest[0])))
    ticks = [tick for tick in range(-3, 4) if abs(tick) <= end]
    texts = [
        [f"{layer}, expert {expert}<br>{load:.2f} × an even load<br>{count:,} tokens"
         for expert, (load, count) in enumerate(zip(row, counts, strict=True))]
        for layer, row, counts in zip(info.layers, info.loads, info.tokens, strict=True)
    ]  # fmt: skip
    return go.Heatmap(
        x=[*range(len(info.loads[0]))], y=[*range(len(info.layers))],
        z=[[max(-end, min(end, math.log2(load))) if load else -end for load in row] for row in info.loads],
        text=texts, hovertemplate="%{text}<extra></extra>", colorscale=[[*each] for each in _SCALE],
        zmin=-end, zmax=end, xgap=1, ygap=1, showlegend=False,
        colorbar={
            "tickvals": ticks, "ticktext": [f"{2.0**tick:g}×" for tick in ticks], "thickness": 9, "len": 1, "y": 0.5,
            "x": _LEFT[1] + 0.005, "outlinewidth": 0, "tickfont": {"size": 10.5}, "ticks": "", "xpad": 4,
        },
    )  # fmt: skip


def _lines(info: ExpertLoadInfo) -> list[go.Scatter]:
    both: dict[str, Any] = {"x": info.steps, "mode": "lines", "xaxis": "x2"}
    lines = [
        go.Scatter(
            both, y=info.imbalance, yaxis="y2", line={"color": IMBALANCE, "width": 2.2},
            hovertemplate="step %{x}: %{y:.2f} × an even load<extra></extra>",
        )
    ]  # fmt: skip
    if info.drops:
        lines.append(
            go.Scatter(
                both,
                y=info.dropped,
                yaxis="y3",
                line={"color": DROPPED, "width": 1.6},
                hovertemplate="step %{x}: %{y:.1%} dropped<extra></extra>",
            )
        )
    return lines
