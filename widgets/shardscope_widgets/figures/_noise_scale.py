"""The critical batch size and the loss of a run, and whether the batch in use is below, near or above that size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.analytic.large_batch.noise_scale import NoiseScale, noise_scale_from
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._curves import MOST_POINTS, SMOOTHING, finite_or_none, moving_average
from shardscope_widgets.trace import Trace

NOISE = "#2a86d1"
LOSS = "#e06c2c"
IN_USE = "#c5372c"
WELL_BELOW = 0.5
"""Ratio to the critical batch size below which a batch is small. At half the critical batch size, reaching a loss takes
1.5 times the minimum number of samples and 3 times the minimum number of steps."""
WELL_ABOVE = 2.0
"""Ratio to the critical batch size above which a batch is large. At twice the critical batch size, reaching a loss
takes 3 times the minimum number of samples and 1.5 times the minimum number of steps."""
_LEFT, _RIGHT = [0.0, 0.46], [0.56, 1.0]
_BAND_DECADES = 1.5
"""Maximum number of decades by which the batch-size axis extends beyond the estimates and the batch in use."""


class NoiseScaleInfo(NamedTuple):
    """Critical batch sizes (in samples) and losses of a run; None for values that a log axis cannot show."""

    label: str
    batch: int
    steps: tuple[int, ...]
    critical: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    loss_steps: tuple[int, ...]
    loss: tuple[float | None, ...]
    smooth_loss: tuple[float | None, ...]

    @property
    def top(self) -> float:
        """Upper end of the batch-size axis, in samples."""
        known = [value for value in self.critical if value]
        most = max([*known, self.batch])
        return float(min(max([*(h for h in self.high if h), most]) * 1.3, most * 10**_BAND_DECADES))

    @property
    def bottom(self) -> float:
        """Lower end of the batch-size axis, in samples."""
        known = [value for value in (*self.critical, self.batch) if value]
        least = min(known)
        return float(
            max(min([*(value for value in self.low if value), least]) / 1.3, least / 10**_BAND_DECADES)
        )


def noise_scale_info(
    noise: NoiseScale, loss_steps: Sequence[int], loss: Sequence[float], *, label: str = ""
) -> NoiseScaleInfo:
    """Combine a run's measured noise scale (``run.noise_scale()``) with its losses (``run.metrics()``).

    Args:
        noise: Measured noise scale of the run.
        loss_steps: Steps at which the loss was recorded.
        loss: Loss at each of these steps.
        label: Name of the run, used in the text.
    """
    smooth = moving_average(loss, span=SMOOTHING)
    every = slice(None, None, max(1, math.ceil(len(loss) / MOST_POINTS)))
    each = slice(None, None, max(1, math.ceil(len(noise.steps) / MOST_POINTS)))
    return NoiseScaleInfo(
        label=label,
        batch=noise.batch,
        steps=noise.steps[each],
        critical=_finite(noise.critical_batch)[each],
        low=_finite(noise.low)[each],
        high=_finite(noise.high)[each],
        loss_steps=tuple(int(step) for step in loss_steps)[every],
        loss=finite_or_none(loss[every]),
        smooth_loss=finite_or_none(smooth[every]),
    )


def noise_scale_info_of(trace: Trace) -> NoiseScaleInfo | None:
    """Return the data of the figure for a run so far; None if it does not measure noise or has no estimate yet."""
    if not trace.noise:
        return None
    noise = noise_scale_from(trace.noise, *trace.batches)
    numbers, loss = trace.steps.column("number"), trace.steps.column("loss")
    info = noise_scale_info(noise, numbers, loss, label=trace.label)
    return info if any(value is not None for value in info.critical) else None


def _finite(values: Sequence[float]) -> tuple[float | None, ...]:
    """Return the values, with None in place of those that a logarithmic axis cannot show."""
    return tuple(value if math.isfinite(value) and value > 0 else None for value in values)


def noise_scale_text(info: NoiseScaleInfo) -> str:
    """Return a sentence that compares the batch size in use with the critical batch size."""
    if not info.steps:
        return "No step has reported its gradient noise yet."
    last = info.critical[-1]
    named = f"{info.label}: " if info.label else ""
    if last is None:
        return f"{named}the gradient cannot be distinguished from noise yet, so the critical batch size is unknown."
    low, high = info.low[-1], info.high[-1]
    until = "no upper limit yet" if high is None else _samples(high)
    return (
        f"{named}the critical batch size is about {_samples(last)} samples (95% confidence interval "
        f"{_samples(low or 0)} to {until}) at step {info.steps[-1]}; {_verdict(info.batch, last)}."
    )


def _samples(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _verdict(batch: int, critical: float) -> str:
    used = f"the batch size in use, {batch:,},"
    if batch < WELL_BELOW * critical:
        return f"{used} is well below this: a larger one would save steps almost in proportion"
    if batch > WELL_ABOVE * critical:
        return f"{used} is well above this: a larger one would hardly save steps"
    return f"{used} is close to this: a larger one would save steps but take more samples"


def draw_noise_scale(info: NoiseScaleInfo) -> go.Figure:
    """Draw the critical batch size with its confidence band on the left, and the loss on the right."""
    figure = go.Figure([*_batches(info), *_losses(info)])
    figure.update_layout(
        xaxis=theme.axis("step", domain=_LEFT, anchor="y"),
        yaxis=theme.axis(
            anchor="x", type="log", range=[math.log10(info.bottom), math.log10(info.top)], dtick="D2", tickformat="~s",
        ),
        xaxis2=theme.axis("step", domain=_RIGHT, anchor="y2", matches="x"),
        yaxis2=theme.axis(anchor="y2", nticks=6) | {"anchor": "x2"},
        annotations=[
            theme.heading(
                "Critical batch size",
                f"with 95% band; <span style='color:{IN_USE}'>┄ in use, {info.batch:,}</span>", x=_LEFT[0],
            ),
            theme.heading("Loss", "bold: smoothed", x=_RIGHT[0]),
        ],
        shapes=[theme.rule(IN_USE, y=info.batch, along="x domain")],
        showlegend=False,
    )  # fmt: skip
    return theme.style(figure, height=316, margin={"l": 8, "r": 12, "t": 52, "b": 8})


def _batches(info: NoiseScaleInfo) -> list[go.Scatter]:
    edge: dict[str, Any] = {"x": info.steps, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    low = [info.bottom if value is None else value for value in info.low]
    high = [10 * info.top if value is None else value for value in info.high]
    return [
        go.Scatter(edge, y=low),
        go.Scatter(edge, y=high, fill="tonexty", fillcolor="rgba(42,134,209,0.22)"),
        go.Scatter(
            x=info.steps, y=info.critical, mode="lines", line={"color": NOISE, "width": 2.2},
            customdata=list(zip(map(_end, info.low), map(_end, info.high), strict=True)),
            hovertemplate="step %{x}: %{y:,.3~s} samples<br>95% confidence: %{customdata[0]} to %{customdata[1]}"
            "<extra></extra>",
        ),
    ]  # fmt: skip


def _end(value: float | None) -> str:
    return "no limit" if value is None else _samples(value)


def _losses(info: NoiseScaleInfo) -> list[go.Scatter]:
    both: dict[str, Any] = {"x": info.loss_steps, "xaxis": "x2", "yaxis": "y2", "mode": "lines"}
    hover = "step %{x}: %{y:.4g}<extra></extra>"
    return [
        go.Scatter(both, y=info.loss, line={"color": LOSS, "width": 1}, opacity=0.28, hoverinfo="skip"),
        go.Scatter(both, y=info.smooth_loss, line={"color": LOSS, "width": 2.2}, hovertemplate=hover),
    ]


def noise_scale_info_of_run(run: Any) -> NoiseScaleInfo:
    """Return the data of the figure of a `shardscope.Run`."""
    metrics = run.metrics().dropna(subset=["loss"])
    return noise_scale_info(
        run.noise_scale(), metrics["step"].tolist(), metrics["loss"].tolist(), label=run.name
    )


def noise_scale(run: Any) -> go.Figure:
    """Draw the critical batch size of a `shardscope.Run` over its steps, with the batch in use and the loss."""
    return draw_noise_scale(noise_scale_info_of_run(run))
