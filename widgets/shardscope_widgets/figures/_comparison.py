"""Comparison of runs: a table of their main metrics, and a bar chart of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.summary import summarise
from shardscope_widgets.figures import theme
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import bytes_text, plural, rate_text, seconds_text, three_digits

HEADERS = (
    "run",
    "ranks",
    "steps",
    "loss",
    "step time",
    "throughput",
    "sent per step",
    "memory per rank",
    "speed",
)


class RunRow(NamedTuple):
    """Metrics of one run, as in its summary; None where not known yet.

    `speed` is throughput relative to the single-process run of the same workload.
    """

    label: str
    strategy: str
    workload: str
    world_size: int
    steps: int
    last_step: int
    loss: float | None
    step_time_s: float | None
    per_second: float | None
    counted: str
    bytes_per_step: float | None
    peak_memory_bytes: int | None
    speed: float | None

    def cells(self) -> tuple[str, ...]:
        """Return the row as text cells, in the order of `HEADERS`."""
        none = "–"
        return (
            self.label,
            str(self.world_size),
            str(self.steps),
            none if self.loss is None else f"{self.loss:.4f}",
            none if self.step_time_s is None else seconds_text(self.step_time_s),
            none if self.per_second is None else rate_text(self.per_second, self.counted),
            none if self.bytes_per_step is None else bytes_text(self.bytes_per_step),
            none if self.peak_memory_bytes is None else bytes_text(self.peak_memory_bytes),
            none if self.speed is None else f"{three_digits(self.speed)} ×",
        )


def comparison_info(traces: Sequence[Trace]) -> tuple[RunRow, ...]:
    """Return one row per run, in the order of `traces`."""
    rows = [_row(trace) for trace in traces]
    base = {row.workload: row.per_second for row in rows if row.world_size == 1 and row.per_second}
    return tuple(_with_speed(row, base.get(row.workload)) for row in rows)


def _row(trace: Trace) -> RunRow:
    told = summarise(trace, state="")
    return RunRow(
        trace.label, trace.strategy, trace.workload, trace.world_size, told.steps, told.last_step, told.loss,
        told.step_time_s, told.tokens_per_s or told.samples_per_s, "tokens" if told.tokens_per_s else "samples",
        told.bytes_per_step, told.peak_memory_bytes, speed=None,
    )  # fmt: skip


def _with_speed(row: RunRow, base: float | None) -> RunRow:
    return row._replace(speed=row.per_second / base) if base and row.per_second else row


def comparison_text(rows: Sequence[RunRow]) -> str:
    """Summarise the table: one sentence for each workload with more than one run."""
    sentences = []
    for workload in dict.fromkeys(row.workload for row in rows):
        own = [row for row in rows if row.workload == workload and row.per_second]
        if len(own) > 1:
            sentences.append(_verdict(workload, own))
    return " ".join(sentences)


def _verdict(workload: str, rows: Sequence[RunRow]) -> str:
    fastest = max(rows, key=lambda row: row.per_second or 0.0)
    losses = [row.loss for row in rows if row.loss is not None]
    rate = rate_text(fastest.per_second or 0.0, fastest.counted)
    text = f"{workload}: {fastest.label} is the fastest with {rate}"
    if fastest.speed and fastest.world_size > 1:
        text += f", {three_digits(fastest.speed)} times one process on {plural(fastest.world_size, 'rank')}"
    if len(losses) < len(rows) or len({row.last_step for row in rows}) > 1:
        return f"{text}."
    spread = max(losses) - min(losses)
    return f"{text}; the final losses lie within {three_digits(spread)} of each other."


def draw(rows: Sequence[RunRow]) -> go.Figure:
    """Draw step time, bytes and memory as three groups of horizontal bars."""
    panels = (
        ("Step time", "s", [row.step_time_s for row in rows]),
        ("Sent per step", "B", [row.bytes_per_step for row in rows]),
        ("Peak memory per rank", "B", [row.peak_memory_bytes for row in rows]),
    )
    figure = go.Figure()
    labels = [row.label for row in rows]
    looks = theme.run_looks([row.strategy for row in rows])
    width, gap = 0.29, 0.065
    for number, (title, unit, values) in enumerate(panels, start=1):
        left = (number - 1) * (width + gap)
        suffix = "" if number == 1 else str(number)
        figure.add_trace(
            go.Bar(
                x=values,
                y=labels,
                orientation="h",
                xaxis=f"x{suffix}",
                yaxis=f"y{suffix}",
                marker={
                    "color": [look.colour for look in looks],
                    "pattern": {"shape": [look.pattern for look in looks]},
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
        figure.add_annotation(theme.note(f"<b>{title}</b>", x=left, y=1) | {"yshift": 6})
    return theme.style(figure, height=90 + 30 * max(2, len(rows)))


def comparison(traces: Sequence[Trace]) -> go.Figure:
    """Draw step time, bytes sent per step and peak memory of several runs as bars."""
    return draw(comparison_info(traces))
