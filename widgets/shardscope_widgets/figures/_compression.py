"""What compression saved and what it cost: bytes a step, where the step's time went, and what is still owed.

Runs of one workload beside each other, the uncompressed one first. A step's time is that of computing, of packing and
unpacking that computing does not hide, and the rest, in which a rank waits for the wire or for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures._comparison import LAST, WARM_UP
from shardscope_widgets.figures._compression_look import method_look
from shardscope_widgets.figures._timeline import COMPUTE, union
from shardscope_widgets.trace import Span, Trace
from shardscope_widgets.words import bytes_text, listed, seconds_text

CODEC = "codec"
PARTS = (
    ("compute", theme.Look("#2a6fb5")),
    ("pack and unpack", theme.Look("#c49a0c", pattern="/")),
    ("wait for the wire", theme.Look("#e06c2c", pattern=".")),
)
_LEFT, _MIDDLE, _RIGHT = [0.0, 0.27], [0.37, 0.64], [0.74, 1.0]


class CompressedRun(NamedTuple):
    """One run. `parts` are seconds of a step in the order of `PARTS`; `ratio` is bytes of the uncompressed run over
    this one's, None where there is none to compare with; `owed` is the residual's norm by step.
    """

    label: str
    strategy: str
    method: str
    method_label: str
    bytes_per_step: float
    ratio: float | None
    parts: tuple[float, float, float]
    loss: float
    accuracy: float | None
    owed: tuple[tuple[int, float], ...]

    @property
    def step_s(self) -> float:
        """Of the whole step."""
        return sum(self.parts)


class CompressionInfo(NamedTuple):
    """All runs of one workload; the uncompressed ones first."""

    runs: tuple[CompressedRun, ...]

    @property
    def is_telling(self) -> bool:
        """Whether any run is compressed."""
        return any(run.method != "none" for run in self.runs)


def compression_info(traces: Sequence[Trace]) -> CompressionInfo:
    """The runs on several ranks that have taken a step."""
    telling = [trace for trace in traces if trace.world_size > 1 and trace.steps]
    telling.sort(key=lambda trace: trace.method != "none")
    plain = {trace.workload: _bytes(trace) for trace in reversed(telling) if trace.method == "none"}
    return CompressionInfo(tuple(_run(trace, plain.get(trace.workload)) for trace in telling))


def _run(trace: Trace, plain: float | None) -> CompressedRun:
    sent = _bytes(trace)
    accuracies = [event["accuracy"] for event in trace.evals if event.get("accuracy") is not None]
    owed = next((figures for name, figures in sorted(trace.kept.items()) if name.endswith("norm")), {})
    return CompressedRun(
        trace.label, trace.strategy, trace.method, trace.method_label, sent,
        plain / sent if plain and sent else None, step_parts(trace),
        fmean(step.loss for step in trace.steps[-LAST:]), float(accuracies[-1]) if accuracies else None,
        tuple(sorted(owed.items())),
    )  # fmt: skip


def _bytes(trace: Trace) -> float:
    return median(step.bytes_sent for step in trace.steps[WARM_UP:] or trace.steps)


def step_parts(trace: Trace) -> tuple[float, float, float]:
    """Seconds a step of computing, of packing that it does not hide, and of the rest; medians over steps."""
    times = {step.number: step.step_time_s for step in trace.steps}
    numbers = [number for number in trace.complete_span_steps() if number in times]
    shown = numbers[WARM_UP:] or numbers
    if not shown:
        return (0.0, 0.0, median(times.values()))
    rows = [_parts_of(trace.spans[number], times[number], trace.world_size) for number in shown]
    compute, codec, rest = (median(row[i] for row in rows) for i in range(3))
    return (compute, codec, rest)


def _parts_of(spans: Sequence[Span], seconds: float, world_size: int) -> tuple[float, float, float]:
    """Means over the ranks."""
    compute = codec = 0.0
    for rank in range(world_size):
        own = [span for span in spans if span.rank == rank]
        computing = [(span.start, span.end) for span in own if span.lane == COMPUTE]
        packing = [(span.start, span.end) for span in own if span.lane == CODEC]
        alone = _length(computing)
        compute += alone / world_size
        codec += (_length(computing + packing) - alone) / world_size
    return (compute, codec, max(0.0, seconds - compute - codec))


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in union(intervals))


def compression_text(info: CompressionInfo) -> str:
    """The bars in words."""
    plain = next((run for run in info.runs if run.method == "none"), None)
    packed = [run for run in info.runs if run.method != "none"]
    if not packed:
        return "No run is compressed."
    return " ".join(_sentence(run, plain) for run in packed)


def _sentence(run: CompressedRun, plain: CompressedRun | None) -> str:
    parts = [f"sends {bytes_text(run.bytes_per_step)} a step", f"packs for {seconds_text(run.parts[1])}"]
    if run.ratio is not None and plain is not None:
        parts[0] += f", {run.ratio:.3g} times less than uncompressed"
        parts.append(f"takes {seconds_text(run.step_s)} instead of {seconds_text(plain.step_s)} a step")
        parts.append(f"has come to loss {run.loss:.4f} against {plain.loss:.4f}")
    return f"{run.label} {listed(parts)}."


def draw(info: CompressionInfo) -> go.Figure:
    """Three plots: bytes, the parts of a step, and the residual over the steps."""
    names = _names(info)
    figure = go.Figure([_bytes_bars(info, names), *_part_bars(info, names), *_owed(info)])
    headings = (
        ("Bytes sent", "a step, all ranks", _LEFT),
        ("Time", "of a step", _MIDDLE),
        ("Still owed", "norm of the residual", _RIGHT),
    )
    figure.update_layout(
        barmode="stack", bargap=0.35,
        xaxis=theme.axis(domain=_LEFT, anchor="y", type="category"),
        yaxis=theme.axis(anchor="x", type="log", tickformat="~s", ticksuffix="B", nticks=6),
        xaxis2=theme.axis(domain=_MIDDLE, anchor="y2", type="category"),
        yaxis2=theme.axis(anchor="x2", tickformat="~s", ticksuffix="s", rangemode="tozero"),
        xaxis3=theme.axis("step", domain=_RIGHT, anchor="y3"),
        yaxis3=theme.axis(anchor="x3", tickformat="~g", rangemode="tozero"),
        annotations=[
            theme.note(f'<b>{title}</b>  <span style="font-size:11px">{note}</span>', x=x[0], y=1) | {"yshift": 6}
            for title, note, x in headings
        ],
        showlegend=True,
    )  # fmt: skip
    return theme.style(
        figure, height=300, legend=theme.LEGEND_ABOVE, margin={"l": 8, "r": 12, "t": 76, "b": 8}
    )


def _names(info: CompressionInfo) -> list[str]:
    """What stands below the bars: the method, with the strategy where there are several; never the same twice."""
    several = len({run.strategy for run in info.runs}) > 1
    texts = [
        "<br>".join([*([run.strategy] if several else []), *run.method_label.split(" ")]) for run in info.runs
    ]
    return [text if texts.count(text) == 1 else f"{text}<br>({n})" for n, text in enumerate(texts, 1)]


def _bytes_bars(info: CompressionInfo, names: list[str]) -> go.Bar:
    texts = ["" if run.ratio is None or run.method == "none" else f"{run.ratio:.3g} ×" for run in info.runs]
    return go.Bar(
        x=names, y=[run.bytes_per_step for run in info.runs], text=texts, textposition="outside", cliponaxis=False,
        marker={"color": [method_look(run.method).colour for run in info.runs]}, showlegend=False,
        customdata=[run.label for run in info.runs], hovertemplate="%{customdata}<br>%{y:.4~s}B a step<extra></extra>",
    )  # fmt: skip


def _part_bars(info: CompressionInfo, names: list[str]) -> list[go.Bar]:
    return [
        go.Bar(
            x=names,
            y=[run.parts[i] for run in info.runs],
            name=name,
            xaxis="x2",
            yaxis="y2",
            marker={
                "color": look.colour,
                "pattern": {"shape": look.pattern, "fgcolor": "rgba(255,255,255,.55)"},
            },
            customdata=[run.label for run in info.runs],
            hovertemplate=f"%{{customdata}}<br>{name}: %{{y:.3~s}}s<extra></extra>",
        )
        for i, (name, look) in enumerate(PARTS)
    ]


def _owed(info: CompressionInfo) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter", "mode": "lines", "xaxis": "x3", "yaxis": "y3", "showlegend": False,
            "x": [step for step, _ in run.owed], "y": [value for _, value in run.owed],
            "name": f"{number} {run.label}", "line": {"color": method_look(run.method).colour,
                                                      "dash": method_look(run.method).dash, "width": 2},
            "hovertemplate": f"{run.label}<br>step %{{x}}: %{{y:.3g}}<extra></extra>",
        }
        for number, run in enumerate(info.runs, 1)
        if run.owed
    ]  # fmt: skip


def compression(traces: Sequence[Trace]) -> go.Figure:
    """Bytes, time and residuals of several runs, compressed and not."""
    return draw(compression_info(traces))
