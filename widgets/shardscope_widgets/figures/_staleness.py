"""Staleness of the gradients that a parameter server applied: a histogram, and staleness over time.

The staleness of a gradient is the number of updates that were applied after its worker pulled the parameters
and before the gradient itself was applied.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.trace import Trace, Update
from shardscope_widgets.words import plural

MOST_POINTS = 400
"""Maximum number of points over time; in longer runs each point shows the largest staleness of several updates."""
COLOUR = "#2a86d1"
_LEFT, _RIGHT = [0.0, 0.36], [0.45, 1.0]


class StalenessInfo(NamedTuple):
    """Staleness of the gradients in all updates of one run.

    `counts` has (staleness, number of gradients) pairs. `over_time` has (seconds since the first update, largest
    staleness) pairs. `bound` is the staleness bound; None if there is none.
    """

    label: str
    num_updates: int
    counts: tuple[tuple[int, int], ...]
    over_time: tuple[tuple[float, int], ...]
    bound: float | None

    @property
    def is_telling(self) -> bool:
        """Whether any update was applied and the bound permits stale gradients, so that the figure is informative."""
        return self.num_updates > 0 and self.bound != 0

    @property
    def num_gradients(self) -> int:
        """Total number of gradients in all updates."""
        return sum(count for _, count in self.counts)

    @property
    def mean(self) -> float:
        """Mean staleness of all gradients, in updates."""
        return sum(value * count for value, count in self.counts) / max(1, self.num_gradients)

    @property
    def most(self) -> int:
        """Largest staleness of any gradient, in updates."""
        return max((value for value, _ in self.counts), default=0)


def staleness_info(trace: Trace) -> StalenessInfo:
    """Collect the updates that all servers have applied so far."""
    updates = sorted((update for update in trace.updates if update.staleness), key=lambda update: update.t)
    counts = Counter(value for update in updates for value in update.staleness)
    return StalenessInfo(
        trace.label, len(updates), tuple(sorted(counts.items())), _over_time(updates), trace.bound
    )


def _over_time(updates: list[Update]) -> tuple[tuple[float, int], ...]:
    each = max(1, math.ceil(len(updates) / MOST_POINTS))
    groups = [updates[i : i + each] for i in range(0, len(updates), each)]
    return tuple((round(g[0].t - updates[0].t, 4), max(max(u.staleness) for u in g)) for g in groups)


def staleness_text(info: StalenessInfo) -> str:
    """Return a sentence on the mean and the largest staleness."""
    if not info.num_updates:
        return "No server has applied an update yet."
    bound = "no bound" if info.bound is None else f"a bound of {info.bound:g}"
    return (
        f"{info.label}: the server applied {plural(info.num_gradients, 'gradient')} in "
        f"{plural(info.num_updates, 'update')}. They were {info.mean:.1f} updates stale on average and {info.most} at "
        f"most, with {bound}."
    )


def draw_staleness(info: StalenessInfo) -> go.Figure:
    """Draw a histogram on the left and staleness over time on the right, with the bound as a dashed line in both."""
    values, counts = [v for v, _ in info.counts], [c for _, c in info.counts]
    times, worst = [t for t, _ in info.over_time], [v for _, v in info.over_time]
    figure = go.Figure(
        [
            go.Bar(
                x=values, y=counts, width=0.8, marker={"color": COLOUR},
                hovertemplate="%{y} gradients were %{x} updates stale<extra></extra>",
            ),
            go.Scatter(
                x=times, y=worst, xaxis="x2", yaxis="y2", mode="markers",
                marker={"color": COLOUR, "size": 6, "opacity": 0.75},
                hovertemplate="%{y} updates stale after %{x:.2f} s<extra></extra>",
            ),
        ]
    )  # fmt: skip
    top = max(info.most, info.bound or 0)
    figure.update_layout(
        xaxis=theme.axis("updates behind", domain=_LEFT, anchor="y", range=[-0.6, top + 0.9], **_whole(top)),
        yaxis=theme.axis(anchor="x", rangemode="tozero", nticks=5),
        xaxis2=theme.axis("seconds", domain=_RIGHT, anchor="y2", rangemode="tozero"),
        yaxis2=theme.axis(anchor="x2", range=[-0.35, top + 0.9], **_whole(top)),
        annotations=[
            theme.note("<b>Gradients</b> by staleness", x=_LEFT[0], y=1) | {"yshift": 6},
            theme.note("<b>Stalest</b> gradient of each update", x=_RIGHT[0], y=1) | {"yshift": 6},
            *_bound_note(info),
        ],
        shapes=_bound_lines(info),
        showlegend=False,
    )
    return theme.style(figure, height=260)


def _whole(top: float) -> dict[str, Any]:
    """Return axis settings with ticks at integers, at most about eight of them."""
    return {"dtick": max(1, math.ceil(top / 8)), "tickformat": "d"}


def _bound_lines(info: StalenessInfo) -> list[dict[str, Any]]:
    if info.bound is None:
        return []
    beside = theme.rule("#c5372c", x=info.bound + 0.5, along="y domain")
    return [beside, theme.rule("#c5372c", y=info.bound, axis="2", along="x2 domain")]


def _bound_note(info: StalenessInfo) -> list[dict[str, Any]]:
    if info.bound is None:
        return []
    note = theme.note(f"bound {info.bound:g}", x=1, y=info.bound)
    return [
        note
        | {"xref": "x2 domain", "yref": "y2", "xanchor": "right", "font": {"size": 11, "color": theme.GREY}}
    ]


def staleness(trace: Trace) -> go.Figure:
    """Draw the staleness of the gradients in a parameter-server run."""
    return draw_staleness(staleness_info(trace))
