"""Comparison of runs: a table of their main metrics, and a bar chart of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.measure.compare_runs.comparison import SPEED
from shardscope.measure.compare_runs.view import DIVERGED, SPEED_LABEL, result_text
from shardscope.runlog.figures import FIGURES, figure_text
from shardscope.runlog.summary import summarise
from shardscope.spec.settings import one_process_baseline
from shardscope_widgets.figures import theme
from shardscope_widgets.trace import Trace, named_apart
from shardscope_widgets.words import rate_text

HEADERS = (
    "run", "ranks", FIGURES["last_step"].label, FIGURES["loss"].label, FIGURES["step_time_s"].label, "throughput",
    FIGURES["bytes_per_step"].label, FIGURES["held_bytes"].label, FIGURES["process_bytes"].label, SPEED_LABEL,
    "predicted step", "error",
)  # fmt: skip
NONE = "–"
"""Text shown for a metric that a run does not have."""


class RunRow(NamedTuple):
    """Metrics of one run, as in its summary; a metric is None until it is known.

    `speed` is the throughput relative to the single-process run with the same workload: model, data, batch,
    precision and optimizer. `predicted_s` is the step time that was predicted before the run, in seconds.
    """

    label: str
    look: theme.RunStyle
    group: str
    world_size: int
    steps: int
    last_step: int
    loss: float | None
    step_time_s: float | None
    per_second: float | None
    counted: str
    bytes_per_step: float | None
    held_bytes: int | None
    process_bytes: int | None
    speed: float | None = None
    diverged_at: int | None = None
    predicted_s: float | None = None

    @property
    def error(self) -> float | None:
        """Error of the predicted step time, relative to the measured step time; None if either is unknown."""
        if self.predicted_s is None or not self.step_time_s:
            return None
        return self.predicted_s / self.step_time_s - 1

    def cells(self) -> tuple[str, ...]:
        """Return the row as text cells, in the order of `HEADERS`."""
        mark = f" {DIVERGED} diverged" if self.diverged_at is not None else ""
        return (
            self.label,
            str(self.world_size),
            str(self.last_step),
            figure_text("loss", self.loss, NONE) + mark,
            figure_text("step_time_s", self.step_time_s, NONE),
            NONE if self.per_second is None else rate_text(self.per_second, self.counted),
            figure_text("bytes_per_step", self.bytes_per_step, NONE),
            figure_text("held_bytes", self.held_bytes, NONE),
            figure_text("process_bytes", self.process_bytes, NONE),
            result_text(SPEED, self.speed),
            figure_text("step_time_s", self.predicted_s, NONE),
            NONE if self.error is None else f"{self.error * 100:+.0f}%",
        )


def comparison_info(traces: Sequence[Trace]) -> tuple[RunRow, ...]:
    """Return one row per run, in the order of `traces`."""
    looks = theme.run_looks(traces)
    rows = [_row(trace, look) for trace, look in zip(named_apart(traces), looks, strict=True)]
    known = [(trace.job, place) for place, trace in enumerate(traces) if trace.job is not None]
    jobs = [job for job, _ in known]
    for job, place in known:
        index = one_process_baseline(job, jobs)
        base = None if index is None else rows[known[index][1]].per_second
        rate = rows[place].per_second
        rows[place] = rows[place]._replace(speed=rate / base if base and rate else None)
    return tuple(rows)


def _row(trace: Trace, look: theme.RunStyle) -> RunRow:
    told = summarise(trace, state="")
    return RunRow(
        trace.label, look, trace.group, trace.world_size, told.steps, told.last_step, told.loss, told.step_time_s,
        told.tokens_per_s or told.samples_per_s, "tokens" if told.tokens_per_s else "samples", told.bytes_per_step,
        told.held_bytes, told.process_bytes, diverged_at=told.diverged_at,
    )  # fmt: skip


def comparison(traces: Sequence[Trace]) -> go.Figure:
    """Draw step time, bytes sent per step and growth of process memory of several runs as bars."""
    rows = comparison_info(traces)
    panels = (
        ("step_time_s", "s", [row.step_time_s for row in rows]),
        ("bytes_per_step", "B", [row.bytes_per_step for row in rows]),
        ("process_bytes", "B", [row.process_bytes for row in rows]),
    )
    figure = go.Figure()
    labels = [row.label for row in rows]
    width, gap = 0.29, 0.065
    for number, (name, unit, values) in enumerate(panels, start=1):
        left = (number - 1) * (width + gap)
        shown = FIGURES[name]
        heading = f"<b>{shown.title.capitalize()}</b>" + f"<br>{shown.ranks}" * bool(shown.ranks)
        suffix = "" if number == 1 else str(number)
        figure.add_trace(
            go.Bar(
                x=values,
                y=labels,
                orientation="h",
                xaxis=f"x{suffix}",
                yaxis=f"y{suffix}",
                marker={
                    "color": [row.look.colour for row in rows],
                    "pattern": {"shape": [row.look.pattern for row in rows]},
                },
                hovertemplate=f"%{{y}}: %{{x:.3s}}{unit}<extra></extra>",
                showlegend=False,
            )
        )
        figure.update_layout(
            {
                f"xaxis{suffix}": theme.axis(
                    domain=[left, left + width],
                    anchor=f"y{suffix}",
                    tickformat="~s",
                    ticksuffix=unit,
                    nticks=4,
                    rangemode="tozero",
                ),
                f"yaxis{suffix}": theme.axis(
                    anchor=f"x{suffix}",
                    autorange="reversed",
                    showgrid=False,
                    showticklabels=number == 1,
                    type="category",
                ),
            }
        )
        figure.add_annotation(theme.note(heading, x=left, y=1) | {"yshift": 6, "align": "left"})
    return theme.style(figure, height=106 + 30 * max(2, len(rows))).update_layout(margin_t=48)
