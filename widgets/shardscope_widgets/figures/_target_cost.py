"""Steps and samples that reach a target, by batch size: the trade-off that the critical batch size describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from shardscope.analytic.large_batch import steps_to_target
from shardscope_widgets.figures import theme

_POINTS = 60
_BEYOND = 8
"""Factor by which the curve extends beyond the smallest and largest marked batch size."""
_TESTED, _CRITICAL = "#2a86d1", "#c5372c"


class TargetCostInfo(NamedTuple):
    """Batch sizes to mark (in samples), the critical batch size, and the fewest steps that reach the target."""

    min_steps: float
    critical_batch: float
    batches: tuple[int, ...]

    def cost(self, batches: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the number of samples and the number of steps that reach the target at each batch size."""
        sizes = np.asarray(batches, dtype=float)
        steps = np.asarray(
            steps_to_target(sizes, min_steps=self.min_steps, critical_batch=self.critical_batch)
        )
        return (steps * sizes).tolist(), steps.tolist()


def target_cost_text(info: TargetCostInfo) -> str:
    """Return a sentence with the number of steps at the critical batch size."""
    _, [steps] = info.cost([info.critical_batch])
    return (
        f"If reaching the target takes at least {info.min_steps:g} steps at any batch size, it takes {steps:.0f} at "
        f"the critical batch size of {info.critical_batch:.0f} samples."
    )


def target_cost(*, min_steps: float, critical_batch: float, batches: Sequence[int] = ()) -> go.Figure:
    """Draw how many steps and samples reach a target, by batch size.

    Args:
        min_steps: Fewest steps that reach the target, with a batch of any size.
        critical_batch: Critical batch size, in samples.
        batches: Batch sizes to mark, in samples.
    """
    info = target_cost_info(min_steps=min_steps, critical_batch=critical_batch, batches=batches)
    marked = [*info.batches, info.critical_batch]
    samples, steps = info.cost(np.geomspace(min(marked) / _BEYOND, max(marked) * _BEYOND, _POINTS).tolist())
    figure = go.Figure(
        go.Scatter(x=samples, y=steps, mode="lines", line={"color": theme.GREY}, showlegend=False, hoverinfo="skip")
    )  # fmt: skip
    critical = [info.critical_batch]
    figure.add_traces([
        _marks(info, info.batches, name="tested batch sizes", colour=_TESTED, symbol="circle", side="top right"),
        _marks(info, critical, name="critical batch size", colour=_CRITICAL, symbol="diamond", side="bottom left"),
    ])  # fmt: skip
    note = f"if it takes at least {info.min_steps:g} steps"
    heading = f"<b>Cost of a target</b>  <span style='font-size:11px'>{note}</span>"
    return theme.style(
        figure, height=360, head=66,
        annotations=[theme.note(heading, x=0, y=1) | {"yshift": 6}],
        xaxis=theme.axis("samples to the target", type="log", dtick=1),
        yaxis=theme.axis("steps to the target", type="log", dtick=1),
    )  # fmt: skip


def _marks(
    info: TargetCostInfo, batches: Sequence[float], *, name: str, colour: str, symbol: str, side: str
) -> go.Scatter:  # fmt: skip
    samples, steps = info.cost(batches)
    return go.Scatter(
        x=samples, y=steps, name=name, mode="markers+text", text=[f"{batch:.0f}" for batch in batches],
        textposition=side, cliponaxis=False, marker={"size": 10, "color": colour, "symbol": symbol},
        hovertemplate="batch %{text}: %{y:,.0f} steps, %{x:,.0f} samples<extra></extra>",
    )  # fmt: skip


def target_cost_info(
    *, min_steps: float, critical_batch: float, batches: Sequence[int] = ()
) -> TargetCostInfo:
    """Return the data of the figure; the arguments are the same as for `target_cost`."""
    return TargetCostInfo(min_steps, critical_batch, tuple(batches))
