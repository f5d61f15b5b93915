"""Learning-rate range test: loss against a learning rate that rises at every step, and the suggested rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme

if TYPE_CHECKING:
    from shardscope.tuning.lr_range import LrRange

LOSS = "#2a86d1"
SUGGESTED = "#11997a"
LOWEST = "#8b8f99"
_HEADROOM = 0.6
"""Space above the initial loss, as a fraction of the decrease of the loss. If the axis showed the whole divergence, the
decrease would look flat."""


class Mark(NamedTuple):
    """A marked learning rate and its name."""

    name: str
    lr: float
    colour: str
    dash: str


class LrRangeInfo(NamedTuple):
    """Curve and marked rates of the figure; the loss axis runs from `bottom` to `top`.

    `rises_at` is the rate, above the rate with the lowest loss, from which the smoothed loss exceeds the
    initial loss; None if it never does.
    """

    lr: tuple[float, ...]
    loss: tuple[float, ...]
    smooth: tuple[float, ...]
    marks: tuple[Mark, ...]
    bottom: float
    top: float
    exploded: bool
    rises_at: float | None


def lr_range_info(test: LrRange) -> LrRangeInfo:
    """Return the curve, the marked rates, and an axis range that shows the falling loss and the start of divergence."""
    least, first = min(test.smooth), max(test.smooth[: max(1, len(test.smooth) // 10)])
    fall = first - least
    marks = (
        Mark("steepest fall", test.rates.steepest, SUGGESTED, "solid"),
        Mark("lowest loss", test.rates.lowest, LOWEST, "dot"),
        Mark("a tenth of that rate", test.rates.tenth_of_lowest, LOWEST, "dash"),
    )
    above = (
        lr for lr, loss in zip(test.lr, test.smooth, strict=True) if lr > test.rates.lowest and loss > first
    )
    return LrRangeInfo(
        test.lr, test.loss, test.smooth, marks, least - 0.25 * fall, first + _HEADROOM * fall, test.exploded,
        next(above, None),
    )  # fmt: skip


def lr_range_text(info: LrRangeInfo) -> str:
    """Return sentences that state the suggested learning rates and whether the loss diverged."""
    steepest, lowest, tenth = (f"{mark.lr:.2g}" for mark in info.marks)
    end = f"The loss has not diverged at {info.lr[-1]:.2g}, so higher rates may work too"
    if info.exploded:
        rises = "" if info.rises_at is None else f"rises above its initial value at {info.rises_at:.2g}, and "
        end = f"It {rises}diverges at {info.lr[-1]:.2g}, where the test ended"
    return (
        f"The smoothed loss falls fastest at a learning rate of {steepest}, a good first choice, and is lowest at "
        f"{lowest}; a tenth of that, {tenth}, is another common choice. {end}."
    )


def lr_range(test: LrRange) -> go.Figure:
    """Draw the result of ``shardscope.lr_range_test``."""
    info = lr_range_info(test)
    hover = "rate %{x:.2e}: loss %{y:.4g}<extra></extra>"
    figure = go.Figure(
        [
            go.Scatter(
                x=info.lr, y=info.loss, mode="markers", marker={"color": LOSS, "size": 4, "opacity": 0.4},
                hoverinfo="skip", name="loss of each step",
            ),
            go.Scatter(
                x=info.lr, y=info.smooth, mode="lines", line={"color": LOSS, "width": 2.4}, hovertemplate=hover,
                name="smoothed",
            ),
            *(_mark(info, mark) for mark in info.marks),
        ]
    )  # fmt: skip
    figure.update_layout(
        xaxis=theme.axis("learning rate", type="log", tickformat=".0e", dtick=1),
        yaxis=theme.axis("loss", range=[info.bottom, info.top], nticks=6),
    )
    return theme.style(figure, height=320, legend=theme.LEGEND_ABOVE)


def _mark(info: LrRangeInfo, mark: Mark) -> go.Scatter:
    """Return a vertical line at a marked rate, with name and rate in the legend."""
    line: dict[str, Any] = {
        "color": mark.colour,
        "width": 2 if mark.dash == "solid" else 1.6,
        "dash": mark.dash,
    }
    return go.Scatter(
        x=[mark.lr, mark.lr], y=[info.bottom, info.top], mode="lines", line=line, name=f"{mark.name}, {mark.lr:.2g}",
        hovertemplate=f"{mark.name}: {mark.lr:.3g}<extra></extra>",
    )  # fmt: skip
