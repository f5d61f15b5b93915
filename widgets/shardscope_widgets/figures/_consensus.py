"""Distance of the ranks' parameters from their mean at each step, for strategies that average only with neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures._curves import Curve, curve_lines
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.trace import Trace, named_apart


class ConsensusInfo(NamedTuple):
    """One curve per run: root mean square over ranks of |x_i - mean| / |mean|, with x_i the parameters of rank i."""

    curves: tuple[Curve, ...]


def consensus_info(traces: Sequence[Trace]) -> ConsensusInfo:
    """Return curves of the runs that report their distance from consensus.

    A distance of 0, as after averaging over all ranks, becomes None because a logarithmic axis cannot show it.
    """
    looks = theme.run_looks(traces)
    pairs = zip(named_apart(traces), looks, strict=True)
    return ConsensusInfo(tuple(_curve(trace, look) for trace, look in pairs if trace.consensus))


def _curve(trace: Trace, look: RunStyle) -> Curve:
    steps = tuple(sorted(trace.consensus))
    values = tuple(trace.consensus[step] or None for step in steps)
    return Curve(trace.label, look, steps, values, values)


def consensus_text(info: ConsensusInfo) -> str:
    """Return a sentence per run on the distance of its ranks' parameters from their mean."""
    if not info.curves:
        return "No run has reported the distance between the parameters of its ranks."
    return " ".join(map(_sentence, info.curves))


def _sentence(curve: Curve) -> str:
    known = [value for value in curve.values if value]
    if not known:
        return f"{curve.label}: all ranks hold the same parameters at every step."
    return (
        f"{curve.label}: the ranks' parameters differ from their mean by at most {max(known):.1e} of its norm, and by "
        f"{known[-1]:.1e} at the end."
    )


def draw_consensus(info: ConsensusInfo) -> go.Figure:
    """Draw one curve per run, with a logarithmic value axis."""
    lines = [curve_lines(curve, "")[1] for curve in info.curves]
    figure = go.Figure([go.Scatter(line | {"hovertemplate": _HOVER}) for line in lines])
    figure.update_layout(
        xaxis=theme.axis("step"),
        yaxis=theme.axis(type="log", tickformat=".1e", nticks=6),
        annotations=[
            theme.note("<b>Distance from consensus</b>, relative to the mean", x=0, y=1) | {"yshift": 6}
        ],
        showlegend=len(lines) > 1,
    )
    return theme.style(figure, height=260, legend=theme.LEGEND_ABOVE)


_HOVER = "%{fullData.name}<br>step %{x}: %{y:.2e}<extra></extra>"


def consensus(traces: Sequence[Trace]) -> go.Figure:
    """Draw how far the ranks' parameters are from their mean at each step, for several runs."""
    return draw_consensus(consensus_info(traces))
