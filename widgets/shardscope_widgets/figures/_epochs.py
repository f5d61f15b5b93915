"""Epochs of a run on sharded data: step time, and the fraction of shards found in the cache (hit rate)."""

from __future__ import annotations

from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.epochs import Epochs
from shardscope.spec.units import bytes_text
from shardscope_widgets.figures import theme
from shardscope_widgets.words import duration_text

_TIME, _RATE = "#2a6fb5", "#11997a"
_LEFT, _RIGHT = [0.0, 0.46], [0.56, 1.0]


class EpochRow(NamedTuple):
    """One epoch, counted from 1: the mean time of its steps in seconds, its hit rate, and the bytes fetched.

    The hit rate, a fraction of 0 to 1, is None if there is no cache.
    """

    number: int
    step_time_s: float
    hit_rate: float | None
    fetched_bytes: int


class EpochsInfo(NamedTuple):
    """The epochs of a run in which steps have finished; empty unless the run trains on shards."""

    rows: tuple[EpochRow, ...]


def epochs_info(epochs: Epochs) -> EpochsInfo:
    """Return the epochs of a run, such as ``run.reduced().epochs``."""
    return EpochsInfo(
        tuple(
            EpochRow(number + 1, epoch.step_time_s, epoch.hit_rate, epoch.fetched_bytes)
            for number, epoch in sorted(epochs.items())
            if epoch.step_time_s is not None
        )
    )


def epochs_text(info: EpochsInfo) -> str:
    """Return a sentence that compares the first epoch with the last."""
    if not info.rows:
        return "No step on shards has finished yet."
    first, last = info.rows[0], info.rows[-1]
    if len(info.rows) == 1:
        return f"In its only epoch, a step takes {duration_text(first.step_time_s)}{_cached(first)}."
    return (
        f"In epoch {first.number}, a step takes {duration_text(first.step_time_s)}{_cached(first)}; in epoch "
        f"{last.number}, {duration_text(last.step_time_s)}{_cached(last)}, "
        f"{first.step_time_s / last.step_time_s:.1f} times as fast."
    )


def _cached(row: EpochRow) -> str:
    if row.hit_rate is None:
        return f" ({bytes_text(row.fetched_bytes)} fetched)" if row.fetched_bytes else ""
    return f" ({row.hit_rate:.0%} of the shards in the cache, {bytes_text(row.fetched_bytes)} fetched)"


def epochs(found: Epochs) -> go.Figure:
    """Draw the time of a step and the hit rate in each epoch.

    Example:
        >>> epochs(run.reduced().epochs)  # doctest: +SKIP
    """
    info = epochs_info(found)
    numbers = [row.number for row in info.rows]
    rates = [row.hit_rate for row in info.rows]
    figure = go.Figure(
        [
            go.Bar(
                x=numbers, y=[row.step_time_s for row in info.rows], marker={"color": _TIME},
                text=[duration_text(row.step_time_s) for row in info.rows], textposition="auto", textangle=0,
                hovertemplate="epoch %{x}: %{text} a step<extra></extra>",
            ),
            go.Bar(
                x=numbers, y=rates, xaxis="x2", yaxis="y2", marker=theme.striped(theme.RunStyle(_RATE, pattern="/")),
                text=["no cache" if rate is None else f"{rate:.0%}" for rate in rates],
                textposition="auto", textangle=0,
                hovertemplate="epoch %{x}: %{text} in the cache<extra></extra>",
            ),
        ]
    )  # fmt: skip
    whole = {"dtick": max(1, -(-len(numbers) // 8)), "tickformat": "d"}
    figure.update_layout(
        xaxis=theme.axis("epoch", domain=_LEFT, anchor="y", **whole),
        yaxis=theme.axis(anchor="x", rangemode="tozero", tickformat="~s", ticksuffix="s", nticks=5),
        xaxis2=theme.axis("epoch", domain=_RIGHT, anchor="y2", **whole),
        yaxis2=theme.axis(anchor="x2", range=[0, 1.02], tickformat=".0%", nticks=5),
        annotations=[
            theme.note("<b>Time of a step</b>, mean", x=_LEFT[0], y=1) | {"yshift": 6},
            theme.note("<b>Hit rate</b> of the cache", x=_RIGHT[0], y=1) | {"yshift": 6},
        ],
        showlegend=False,
    )
    return theme.style(figure, height=260)
