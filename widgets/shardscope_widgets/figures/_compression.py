"""Savings and cost of compression: bytes per step, breakdown of the step time, and norm of the compression residual.

Runs are shown side by side, uncompressed ones first. A compressed run is compared with the uncompressed run of the same
workload, strategy and number of ranks; their times are compared only if both used the same link. The step time is
divided into compute time, exposed codec time (compression and decompression not hidden by compute), and the remaining
time, in which a rank waits for the network or for other ranks. Bytes are means and times medians per step, over whole
periods of local SGD (`Trace.per_step`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.figures import FIGURES, figure_text
from shardscope.runlog.spans import covered
from shardscope.runlog.steps import StepKinds, per_step
from shardscope.spec.settings import uncompressed_baseline
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._ghosts import Gap, Ghost, diamonds, largest_gap
from shardscope_widgets.figures._timeline import COMPUTE
from shardscope_widgets.figures.theme import method_look
from shardscope_widgets.trace import Trace, TraceSpan, named_apart
from shardscope_widgets.words import bytes_text, duration_text, plural

CODEC = "codec"
PARTS = (
    ("compute", theme.RunStyle("#2a6fb5")),
    ("compress and decompress", theme.RunStyle("#c49a0c", pattern="/")),
    ("wait for the network", theme.RunStyle("#e06c2c", pattern=".")),
)
WHOLE = ("parts not measured", theme.RunStyle(theme.GREY, pattern="x"))
_STRATEGY_AND_RANKS = ("strategy", "world_size")
_LEFT, _MIDDLE, _RIGHT = [0.0, 0.27], [0.37, 0.64], [0.74, 1.0]


class CompressedRun(NamedTuple):
    """Metrics of one run, compressed or not.

    `bytes_per_step` and `step_s` are None until its first local-SGD period has ended. `parts` is the time of each of
    `PARTS` in seconds per step; None if no spans were recorded. `loss_mean` is the mean over the last `LOSS_WINDOW`
    steps; None if unknown.
    `residuals` has (step, norm of the residual) pairs. `plain` is the uncompressed baseline; None if there is none.
    `ghost` has the predicted values; None if there are none.
    """

    label: str
    strategy: str
    world_size: int
    link: str
    method: str
    method_label: str
    bytes_per_step: float | None
    step_s: float | None
    parts: tuple[float, float, float] | None
    loss_mean: float | None
    accuracy: float | None
    residuals: tuple[tuple[int, float], ...]
    plain: CompressedRun | None = None
    ghost: Ghost | None = None

    @property
    def ratio(self) -> float | None:
        """Compression ratio: bytes sent by the uncompressed run divided by bytes sent by this run; None if unknown."""
        if self.plain is None or not self.plain.bytes_per_step or not self.bytes_per_step:
            return None
        return self.plain.bytes_per_step / self.bytes_per_step


class CompressionInfo(NamedTuple):
    """Uncompressed baselines, without duplicates, followed by the compressed runs."""

    runs: tuple[CompressedRun, ...]

    @property
    def is_telling(self) -> bool:
        """Whether any run is compressed."""
        return any(run.method != "none" for run in self.runs)


def compression_info(
    traces: Sequence[Trace], *, ghosts: Mapping[str, Ghost] | None = None
) -> CompressionInfo:
    """Return the compressed multi-rank runs that have finished a step, preceded by their uncompressed baselines.

    Args:
        traces: The runs.
        ghosts: Predicted values by run id.
    """
    known = ghosts or {}
    telling = [trace for trace in named_apart(traces) if trace.world_size > 1 and trace.steps]
    plain = [trace for trace in telling if trace.method == "none"]
    pairs = [(trace, _plain_of(trace, plain)) for trace in telling if trace.method != "none"]
    shown = [_run(trace, known) for trace in plain if any(trace is other for _, other in pairs)]
    packed = [
        _run(trace, known)._replace(plain=_run(other, known) if other else None) for trace, other in pairs
    ]
    return CompressionInfo((*shown, *packed))


def _plain_of(trace: Trace, plain: Sequence[Trace]) -> Trace | None:
    """Return the uncompressed run with the same workload, strategy and ranks; None if there is none."""
    known = [other for other in plain if other.job is not None]
    if trace.job is None:
        return None
    index = uncompressed_baseline(trace.job, [other.job for other in known if other.job is not None])
    return None if index is None else known[index]


def _run(trace: Trace, ghosts: Mapping[str, Ghost]) -> CompressedRun:
    accuracies = [each.accuracy for each in trace.evaluations if not math.isnan(each.accuracy)]
    residuals = next((figures for name, figures in sorted(trace.kept.items()) if name.endswith("norm")), {})
    return CompressedRun(
        trace.label, trace.strategy, trace.world_size, trace.link, trace.method, trace.method_label,
        trace.bytes_per_step, trace.step_time_s, step_parts(trace),
        trace.loss_mean, accuracies[-1] if accuracies else None,
        tuple(sorted(residuals.items())), ghost=ghosts.get(trace.run_id),
    )  # fmt: skip


def step_parts(trace: Trace) -> tuple[float, float, float] | None:
    """Return the compute time, the exposed codec time and the remaining time of a step, in seconds.

    Compute and codec time are medians over the steps with recorded spans; the remaining time completes them to the
    median step time. None if there are no spans.
    """
    times = {step.number: step.step_time_s for step in trace.steps if step.number in trace.spans}
    rows = {
        number: _parts_of(trace.spans[number], trace.world_size)
        for number in trace.complete_span_steps()
        if number in times
    }
    compute, codec = (
        per_step([*rows], [row[i] for row in rows.values()], StepKinds(trace.kinds.period), average="median")
        for i in range(2)
    )
    if compute is None or codec is None or trace.step_time_s is None:
        return None
    return (compute, codec, max(0.0, trace.step_time_s - compute - codec))


def _parts_of(spans: Sequence[TraceSpan], world_size: int) -> tuple[float, float]:
    """Return the compute time and the exposed codec time of one step in seconds, as means over ranks."""
    compute = codec = 0.0
    for rank in range(world_size):
        own = [span for span in spans if span.rank == rank]
        computing = [(span.start, span.end) for span in own if span.lane == COMPUTE]
        packing = [(span.start, span.end) for span in own if span.lane == CODEC]
        alone = covered(computing)
        compute += alone / world_size
        codec += (covered(computing + packing) - alone) / world_size
    return compute, codec


def compression_text(info: CompressionInfo) -> str:
    """Describe the bars in words, one line per compressed run."""
    packed = [run for run in info.runs if run.method != "none"]
    lines = [*map(_sentence, packed), _gap(info)]
    return "\n".join(filter(None, lines)) if packed else "No run is compressed."


def _sentence(run: CompressedRun) -> str:
    told = [f"{run.label} {_bytes_words(run)} and {_codec_words(run)}."]
    plain = run.plain
    if plain is not None:
        if plain.link == run.link and plain.step_s is not None and run.step_s is not None:
            told.append(f"A step takes {duration_text(run.step_s)} instead of {duration_text(plain.step_s)}.")
        own, other = (figure_text("loss_mean", each.loss_mean) for each in (run, plain))
        told.append(f"Its {FIGURES['loss_mean'].label} is {own}, versus {other} uncompressed.")
    return " ".join(told)


def _bytes_words(run: CompressedRun) -> str:
    if run.bytes_per_step is None:
        return "has not finished its first period of local SGD"
    words = f"sends {bytes_text(run.bytes_per_step)} per step over all ranks"
    return words if run.ratio is None else f"{words}, {run.ratio:.3g} times less than uncompressed"


def _codec_words(run: CompressedRun) -> str:
    if run.parts is None:
        return "has no measured compression time"
    return (
        f"spends {duration_text(run.parts[1])} per step on compression"
        if run.parts[1]
        else "compresses nothing"
    )


def draw_compression(info: CompressionInfo) -> go.Figure:
    """Draw three plots: bytes sent, the breakdown of the step time, and the residual over the steps."""
    names, has_residuals = _names(info), any(run.residuals for run in info.runs)
    figure = go.Figure(
        [_bytes_bars(info, names), *_part_bars(info, names), *_ghosts(info, names), *_residuals(info)]
    )
    bars: dict[str, Any] = {"type": "category", "autotickangles": [0, 30, 90]}
    headings = (
        ("Bytes sent", "per step, all ranks", _LEFT),
        ("Time", "per step", _MIDDLE),
        ("Residual", "norm of what is not sent yet", _RIGHT),
    )
    figure.update_layout(
        barmode="stack", bargap=0.35,
        xaxis=theme.axis(domain=_LEFT, anchor="y", **bars),
        yaxis=theme.axis(anchor="x", tickformat="~s", ticksuffix="B", nticks=6, rangemode="tozero"),
        xaxis2=theme.axis(domain=_MIDDLE, anchor="y2", **bars),
        yaxis2=theme.axis(anchor="x2", tickformat="~s", ticksuffix="s", rangemode="tozero"),
        xaxis3=theme.axis("step" if has_residuals else "", domain=_RIGHT, anchor="y3", visible=has_residuals),
        yaxis3=theme.axis(anchor="x3", tickformat="~g", range=_residual_range(info), visible=has_residuals),
        annotations=[
            theme.heading(title, note, x=x[0]) for title, note, x in headings
        ]
        + ([] if has_residuals else [_no_residuals()]),
        showlegend=True,
        legend2={"x": _RIGHT[0], "y": 1, "yanchor": "top", "bgcolor": "rgba(0,0,0,0)", "font": {"size": 11}},
    )  # fmt: skip
    return theme.style(
        figure,
        height=320,
        head=92,
    )


def _names(info: CompressionInfo) -> list[str]:
    """Return distinct labels for the bars: the method, plus strategy and ranks where these differ, else the link."""
    texts = [_label(info, run, _STRATEGY_AND_RANKS) for run in info.runs]
    if len({*texts}) < len(texts):
        texts = [_label(info, run, (*_STRATEGY_AND_RANKS, "link")) for run in info.runs]
    return [text if texts.count(text) == 1 else f"{text}<br>({n})" for n, text in enumerate(texts, 1)]


def _label(info: CompressionInfo, run: CompressedRun, fields: Sequence[str]) -> str:
    """Return the values of a run's `fields` that differ among the runs, then its method, with one word per line."""
    texts = {
        "strategy": run.strategy,
        "world_size": plural(run.world_size, "rank"),
        "link": (run.link or "no link").removesuffix(", 0 s"),
    }
    told = [texts[field] for field in fields if len({getattr(other, field) for other in info.runs}) > 1]
    return "<br>".join(word for text in (*told, run.method_label) for word in text.split(" "))


def _bytes_bars(info: CompressionInfo, names: list[str]) -> go.Bar:
    texts = ["" if run.ratio is None or run.method == "none" else f"{run.ratio:.3g} ×" for run in info.runs]
    return go.Bar(
        x=names, y=[run.bytes_per_step for run in info.runs], text=texts, textposition="outside",
        cliponaxis=False, constraintext="none",
        marker={"color": [method_look(run.method).colour for run in info.runs]}, showlegend=False,
        customdata=[run.label for run in info.runs], hovertemplate="%{customdata}<br>%{y:.4~s}B/step<extra></extra>",
    )  # fmt: skip


def _part_bars(info: CompressionInfo, names: list[str]) -> list[go.Bar]:
    """Return one bar per part of the step; runs without spans get a single bar for the whole step."""
    bars = [
        _part_bar(info, names, [run.parts[i] if run.parts else None for run in info.runs], *part)
        for i, part in enumerate(PARTS)
    ]
    whole = [run.step_s if run.parts is None else None for run in info.runs]
    return [*bars, *([] if whole.count(None) == len(whole) else [_part_bar(info, names, whole, *WHOLE)])]


def _part_bar(
    info: CompressionInfo, names: list[str], seconds: list[float | None], name: str, look: theme.RunStyle
) -> go.Bar:
    return go.Bar(
        x=names, y=seconds, name=name, xaxis="x2", yaxis="y2",
        marker=theme.striped(look),
        customdata=[run.label for run in info.runs],
        hovertemplate=f"%{{customdata}}<br>{name}: %{{y:.3~s}}s<extra></extra>",
    )  # fmt: skip


def _ghosts(info: CompressionInfo, names: list[str]) -> list[dict[str, Any]]:
    """Return diamonds at the predicted bytes and times; none without predictions."""
    ghosts = [run.ghost for run in info.runs]
    if not any(ghosts):
        return []
    return [
        diamonds(names, [ghost and ghost.sent_bytes for ghost in ghosts], "", "predicted", "B"),
        diamonds(names, [ghost and ghost.step_s for ghost in ghosts], "2", "predicted", "s"),
    ]


def _gap(info: CompressionInfo) -> str:
    """Return a sentence on the largest gap between prediction and measurement; empty without predictions."""
    gaps = []
    for run in info.runs:
        if run.ghost is not None and run.ghost.sent_bytes and run.bytes_per_step:
            gaps.append(Gap(f"bytes of {run.label}", run.ghost.sent_bytes, run.bytes_per_step))
        if run.ghost is not None and run.ghost.step_s and run.step_s:
            gaps.append(Gap(f"a step of {run.label}", run.ghost.step_s, run.step_s))
    return largest_gap(gaps).replace("Dashed and fainter", "Diamonds") if gaps else ""


def _residuals(info: CompressionInfo) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter", "mode": "lines", "xaxis": "x3", "yaxis": "y3", "showlegend": True, "legend": "legend2",
            "x": [step for step, _ in run.residuals], "y": [value for _, value in run.residuals],
            "name": label, "line": {"color": method_look(run.method).colour,
                                                      "dash": method_look(run.method).dash, "width": 2},
            "hovertemplate": f"{run.label}<br>step %{{x}}: %{{y:.3g}}<extra></extra>",
        }
        for label, run in zip(_legend_names(info), info.runs, strict=True)
        if run.residuals
    ]  # fmt: skip


def _residual_range(info: CompressionInfo) -> list[float]:
    """Return a range from 0 that leaves space above the lines for their legend."""
    with_residuals = [run for run in info.runs if run.residuals]
    most = max((value for run in with_residuals for _, value in run.residuals), default=1.0)
    return [0.0, (most or 1.0) * (1.15 + 0.2 * len(with_residuals))]


def _legend_names(info: CompressionInfo) -> list[str]:
    """Return the label of each run's bar on a single line, for the legend."""
    return [name.replace("<br>", " ") for name in _names(info)]


def _no_residuals() -> dict[str, Any]:
    """Return the text that is shown in place of the residuals if no run has any."""
    return {
        "text": "no run has<br>a residual<br>(error feedback)", "x": sum(_RIGHT) / 2, "y": 0.5,
        "xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 12, "color": theme.GREY},
    }  # fmt: skip


def compression(traces: Sequence[Trace]) -> go.Figure:
    """Draw bytes sent, time per step and residuals of compressed runs and their uncompressed baselines."""
    return draw_compression(compression_info(traces))
