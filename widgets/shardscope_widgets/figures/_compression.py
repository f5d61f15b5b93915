"""Savings and cost of compression: bytes per step, breakdown of the step time, and norm of the residual.

Runs are shown side by side, uncompressed ones first. A compressed run is compared with the uncompressed run of the
same workload, strategy and number of ranks; their times are compared only if both used the same link. The step time is
divided into computing, packing and unpacking that computing does not hide, and the rest, during which a rank waits for
the network or for other ranks. All values are per step, averaged over whole periods of local SGD (`Trace.per_step`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.averages import StepKinds, per_step
from shardscope.runlog.spans import covered
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._compression_look import method_look
from shardscope_widgets.figures._timeline import COMPUTE
from shardscope_widgets.trace import Trace, TraceSpan
from shardscope_widgets.words import bytes_text, listed, plural, seconds_text

LAST = 5
"""Number of steps at the end of a run over which its loss is averaged."""
CODEC = "codec"
PARTS = (
    ("compute", theme.RunStyle("#2a6fb5")),
    ("pack and unpack", theme.RunStyle("#c49a0c", pattern="/")),
    ("wait for the wire", theme.RunStyle("#e06c2c", pattern=".")),
)
WHOLE = ("parts not measured", theme.RunStyle(theme.GREY, pattern="x"))
_LEFT, _MIDDLE, _RIGHT = [0.0, 0.27], [0.37, 0.64], [0.74, 1.0]


class CompressedRun(NamedTuple):
    """One run.

    `bytes_per_step` and `step_s` are None until its first local-SGD period has ended. `parts` is the time of each of
    `PARTS` in seconds per step; None if no spans were recorded. `loss_mean` is the mean over the last `LAST` steps.
    `residuals` has (step, norm of the residual) pairs. `plain` is the uncompressed baseline; None if there is none.
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
    loss_mean: float
    accuracy: float | None
    residuals: tuple[tuple[int, float], ...]
    plain: CompressedRun | None = None

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


def compression_info(traces: Sequence[Trace]) -> CompressionInfo:
    """Return the compressed multi-rank runs that have finished a step, preceded by their uncompressed baselines."""
    telling = [trace for trace in traces if trace.world_size > 1 and trace.steps]
    plain = [trace for trace in telling if trace.method == "none"]
    pairs = [(trace, _plain_of(trace, plain)) for trace in telling if trace.method != "none"]
    shown = [_run(trace) for trace in plain if any(trace is other for _, other in pairs)]
    packed = [_run(trace)._replace(plain=_run(other) if other else None) for trace, other in pairs]
    return CompressionInfo((*shown, *packed))


def _plain_of(trace: Trace, plain: Sequence[Trace]) -> Trace | None:
    """Return the uncompressed baseline of a compressed run, on the same link if possible; None if there is none."""
    alike = [other for other in plain if _kind_of(other) == _kind_of(trace)]
    return min(alike, key=lambda other: other.link != trace.link, default=None)


def _kind_of(trace: Trace) -> tuple[str, int, str]:
    return trace.workload, trace.world_size, trace.strategy


def _run(trace: Trace) -> CompressedRun:
    accuracies = [each.accuracy for each in trace.evaluations if not math.isnan(each.accuracy)]
    residuals = next((figures for name, figures in sorted(trace.kept.items()) if name.endswith("norm")), {})
    return CompressedRun(
        trace.label, trace.strategy, trace.world_size, trace.link, trace.method, trace.method_label,
        trace.bytes_per_step, trace.step_time_s, step_parts(trace),
        fmean(trace.steps.column("loss")[-LAST:]), accuracies[-1] if accuracies else None,
        tuple(sorted(residuals.items())),
    )  # fmt: skip


def step_parts(trace: Trace) -> tuple[float, float, float] | None:
    """Return the seconds per step for computing, for packing that computing does not hide, and for the rest.

    Values are means over the steps with recorded spans; None if there are none.
    """
    times = {step.number: step.step_time_s for step in trace.steps if step.number in trace.spans}
    rows = {
        number: _parts_of(trace.spans[number], times[number], trace.world_size)
        for number in trace.complete_span_steps()
        if number in times
    }
    compute, codec, rest = (
        per_step([*rows], [row[i] for row in rows.values()], StepKinds(trace.kinds.period)) for i in range(3)
    )
    return None if compute is None or codec is None or rest is None else (compute, codec, rest)


def _parts_of(spans: Sequence[TraceSpan], seconds: float, world_size: int) -> tuple[float, float, float]:
    """Return the time of each part of one step in seconds, as means over ranks."""
    compute = codec = 0.0
    for rank in range(world_size):
        own = [span for span in spans if span.rank == rank]
        computing = [(span.start, span.end) for span in own if span.lane == COMPUTE]
        packing = [(span.start, span.end) for span in own if span.lane == CODEC]
        alone = covered(computing)
        compute += alone / world_size
        codec += (covered(computing + packing) - alone) / world_size
    return (compute, codec, max(0.0, seconds - compute - codec))


def compression_text(info: CompressionInfo) -> str:
    """Describe the bars in words, one line per compressed run."""
    packed = [run for run in info.runs if run.method != "none"]
    return "\n".join(map(_sentence, packed)) if packed else "No run is compressed."


def _sentence(run: CompressedRun) -> str:
    parts = [_bytes_words(run), _codec_words(run)]
    plain = run.plain
    if plain is not None:
        if plain.link == run.link and plain.step_s is not None and run.step_s is not None:
            parts.append(f"takes {seconds_text(run.step_s)} instead of {seconds_text(plain.step_s)} per step")
        parts.append(f"has reached loss {run.loss_mean:.4f}, versus {plain.loss_mean:.4f} uncompressed")
    return f"{run.label} {listed(parts)}."


def _bytes_words(run: CompressedRun) -> str:
    if run.bytes_per_step is None:
        return "has not finished its first period"
    words = f"sends {bytes_text(run.bytes_per_step)} per step"
    return words if run.ratio is None else f"{words}, {run.ratio:.3g} times less than uncompressed"


def _codec_words(run: CompressedRun) -> str:
    if run.parts is None:
        return "has no measured packing time"
    return f"packs for {seconds_text(run.parts[1])}" if run.parts[1] else "packs nothing"


def draw_compression(info: CompressionInfo) -> go.Figure:
    """Draw three plots: bytes sent, the breakdown of the step time, and the residual over the steps."""
    names, is_owed = _names(info), any(run.residuals for run in info.runs)
    figure = go.Figure([_bytes_bars(info, names), *_part_bars(info, names), *_owed(info)])
    headings = (
        ("Bytes sent", "per step, all ranks", _LEFT),
        ("Time", "per step", _MIDDLE),
        ("Residual", "norm of the gradient not sent yet", _RIGHT),
    )
    figure.update_layout(
        barmode="stack", bargap=0.35,
        xaxis=theme.axis(domain=_LEFT, anchor="y", type="category", tickangle=0),
        yaxis=theme.axis(anchor="x", tickformat="~s", ticksuffix="B", nticks=6, rangemode="tozero"),
        xaxis2=theme.axis(domain=_MIDDLE, anchor="y2", type="category", tickangle=0),
        yaxis2=theme.axis(anchor="x2", tickformat="~s", ticksuffix="s", rangemode="tozero"),
        xaxis3=theme.axis("step" if is_owed else "", domain=_RIGHT, anchor="y3", visible=is_owed),
        yaxis3=theme.axis(anchor="x3", tickformat="~g", rangemode="tozero", visible=is_owed),
        annotations=[
            theme.note(f'<b>{title}</b>  <span style="font-size:11px">{note}</span>', x=x[0], y=1) | {"yshift": 6}
            for title, note, x in headings
        ]
        + ([] if is_owed else [_nothing_owed()]),
        showlegend=True,
    )  # fmt: skip
    return theme.style(
        figure,
        height=300,
        legend=theme.LEGEND_ABOVE | {"x": _MIDDLE[0]},
        margin={"l": 8, "r": 12, "t": 76, "b": 8},
    )


def _names(info: CompressionInfo) -> list[str]:
    """Return distinct labels for the bars: the method, plus strategy, ranks and link where these differ."""
    told = [_differing(info, run) for run in info.runs]
    texts = [
        "<br>".join([*more, *run.method_label.split(" ")]) for more, run in zip(told, info.runs, strict=True)
    ]
    return [text if texts.count(text) == 1 else f"{text}<br>({n})" for n, text in enumerate(texts, 1)]


def _differing(info: CompressionInfo, run: CompressedRun) -> list[str]:
    """Return those of a run's strategy, number of ranks and link that differ among the runs, as text."""
    words = ((run.strategy, "strategy"), (plural(run.world_size, "rank"), "world_size"), (run.link, "link"))
    several = [len({getattr(other, field) for other in info.runs}) > 1 for _, field in words]
    told = [word or "no link" for (word, _), differs in zip(words, several, strict=True) if differs]
    return [part for word in told for part in word.removesuffix(", 0 s").split(" ")]


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
        marker={"color": look.colour, "pattern": {"shape": look.pattern, "fgcolor": "rgba(255,255,255,.55)"}},
        customdata=[run.label for run in info.runs],
        hovertemplate=f"%{{customdata}}<br>{name}: %{{y:.3~s}}s<extra></extra>",
    )  # fmt: skip


def _owed(info: CompressionInfo) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter", "mode": "lines", "xaxis": "x3", "yaxis": "y3", "showlegend": False,
            "x": [step for step, _ in run.residuals], "y": [value for _, value in run.residuals],
            "name": f"{number} {run.label}", "line": {"color": method_look(run.method).colour,
                                                      "dash": method_look(run.method).dash, "width": 2},
            "hovertemplate": f"{run.label}<br>step %{{x}}: %{{y:.3g}}<extra></extra>",
        }
        for number, run in enumerate(info.runs, 1)
        if run.residuals
    ]  # fmt: skip


def _nothing_owed() -> dict[str, Any]:
    """Return the text that is shown in place of the residuals if no run has any."""
    return {
        "text": "no run carries<br>a residual over<br>to its next step", "x": sum(_RIGHT) / 2, "y": 0.5,
        "xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 12, "color": theme.GREY},
    }  # fmt: skip


def compression(traces: Sequence[Trace]) -> go.Figure:
    """Draw bytes sent, time per step and residuals of compressed runs and their uncompressed baselines."""
    return draw_compression(compression_info(traces))
