"""Predicted values drawn fainter under measured values: timeline, bytes and memory of a run, and their largest gap.

`ghost_of` turns a prediction into plain values; the other functions turn these into traces for the figures of the
Training Lab. A predicted step has no overlap, and its parts are those of the rank with the most work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.analytic.terms import Term
from shardscope.measure.compare.measured import COMMUNICATION, IDLE, seconds_by_part
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._stacks import StackBar
from shardscope_widgets.figures._timeline import TimelineInfo
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import bytes_text, collective_text, duration_text, safe

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction
    from shardscope_widgets.figures._overview import MemoryBars

PREDICTED = "predicted"
_ORDER = ("data", "forward", "backward", "codec", COMMUNICATION, "optimizer", IDLE)
"""Parts of a predicted step in the order in which they are drawn."""
_FAINT = 0.45
"""Opacity of predicted bars."""
_ACROSS = 0.035
"""Thickness of a line across a memory bar, as a fraction of the highest bar of the run."""
_NOT_TELLING = 0.02
"""Gap, relative to the measured total, below which prediction and measurement count as equal."""


class GhostPart(NamedTuple):
    """One span of the predicted step: the part of the step that it belongs to, its name, and its time in seconds."""

    part: str
    name: str
    seconds: float


class Ghost(NamedTuple):
    """Predicted values of one run.

    Attributes:
        step_s: Time of a step, in seconds, as a mean if steps have different traffic; None if unknown.
        parts: Parts of a step with all traffic, in order.
        sent_bytes: Mean bytes that all ranks send in a step; None if unknown.
        held: Bytes of each type of memory by rank, in the order of `MEMORY_KINDS`; empty if a type is unknown.
        held_peaks: Peak of all these types together, in bytes, by rank; empty if unknown.
    """

    step_s: float | None
    parts: tuple[GhostPart, ...]
    sent_bytes: float | None
    held: tuple[tuple[int, ...], ...]
    held_peaks: tuple[int, ...] = ()


class Gap(NamedTuple):
    """A difference between prediction and measurement: name of the quantity, and both values."""

    what: str
    predicted: float
    measured: float


def ghost_of(prediction: JobPrediction) -> Ghost:
    """Return the predicted values that figures draw."""
    from shardscope.prediction.job_memory import held_at_once

    kinds, ranks = prediction.kinds, range(prediction.job.world_size)
    period = lcm(prediction.job.compression.period, getattr(prediction.job.strategy, "mix_every", 1))
    steps = [prediction.at_step(prediction.step.number - back) for back in range(period)]
    return Ghost(
        _mean([each.step_time_s for each in steps]),
        () if prediction.time is None else tuple(_parts(prediction.time)),
        _mean([None if each.sent_bytes is None else float(each.sent_bytes.sum()) for each in steps]),
        tuple(tuple(int(kinds[kind][rank]) for kind in MEMORY_KINDS) for rank in ranks)
        if all(kind in kinds for kind in MEMORY_KINDS)
        else (),
        ()
        if prediction.by_rank is None
        else tuple(map(int, held_at_once(prediction.step, kinds, prediction.by_rank))),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _parts(time: Term) -> list[GhostPart]:
    """Return the parts of a step, with communication split into its collectives."""
    known = {part.name: part for part in time.parts}
    found = []
    for name in _ORDER:
        term = known.get(name)
        inside = term.parts if term is not None and name == COMMUNICATION else (term,)
        found += [
            GhostPart(name, each.name, each.value) for each in inside if each is not None and each.value
        ]
    return found


# Loss, throughput, bytes, memory.


def overview_ghosts(trace: Trace, ghost: Ghost, bars: MemoryBars | None = None) -> list[dict[str, Any]]:
    """Return dashed lines for throughput and bytes, and lines across the memory bars, as Plotly JSON.

    Args:
        trace: The run.
        ghost: Its predicted values.
        bars: The bars of its memory: a rank each, or one for all ranks; None to draw no line across them.
    """
    if not trace.steps:
        return []
    first, last, lines = trace.steps[0], trace.steps[-1], []
    ends = [first.number, last.number]
    if ghost.step_s:
        per_step = last.tokens if trace.measures_tokens else last.samples
        lines.append(_line(ends, per_step / ghost.step_s, "2", "%{y:.3s}/s"))
    if ghost.sent_bytes is not None and trace.world_size > 1:
        lines.append(_line(ends, ghost.sent_bytes, "3", "%{y:.4s}B"))
    if ghost.held_peaks and bars is not None and bars.ranks:
        lines.append(_across(bars, ghost.held_peaks))
    return lines


def _line(ends: list[int], value: float, axes: str, value_format: str) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "x": ends, "y": [value, value], "xaxis": f"x{axes}", "yaxis": f"y{axes}",
        "line": {"color": theme.GREY, "width": 1.6, "dash": "dash"}, "name": PREDICTED, "showlegend": False,
        "hovertemplate": f"{PREDICTED}: {value_format}<extra></extra>",
    }  # fmt: skip


def _across(bars: MemoryBars, peaks: Sequence[int]) -> dict[str, Any]:
    """Return lines across a run's bars at predicted peaks: thin bars, because other marks would lie between bars."""
    shown = peaks if len(bars.ranks) > 1 else [max(peaks)]
    thickness = _ACROSS * max(*shown, *bars.peaks)
    return {
        "type": "bar", "x": list(bars.ranks), "y": [thickness] * len(shown), "xaxis": "x4", "yaxis": "y4",
        "base": [peak - thickness / 2 for peak in shown], "offsetgroup": bars.label, "name": PREDICTED,
        "showlegend": False, "customdata": list(map(bytes_text, shown)),
        "marker": {"color": theme.GREY, "line": {"color": "#ffffff", "width": 1}},
        "hovertemplate": f"{safe(bars.label)}, %{{x}}<br>{PREDICTED}: %{{customdata}}<extra></extra>",
    }  # fmt: skip


def overview_gap(trace: Trace, ghost: Ghost) -> str:
    """Return a sentence on the less accurate prediction (step time or bytes per step), or an empty string."""
    step_s, sent = trace.step_time_s, trace.bytes_per_step
    gaps = []
    if ghost.step_s and step_s:
        gaps.append(Gap("step time", ghost.step_s, step_s))
    if ghost.sent_bytes is not None and sent:
        gaps.append(Gap("bytes per step", ghost.sent_bytes, sent))
    if not gaps:
        return ""
    return largest_gap(gaps)


def largest_gap(gaps: Sequence[Gap]) -> str:
    """Return a sentence on the gap that is largest relative to its measured value; quantities with "bytes" in their
    name are in bytes.
    """
    worst = max(gaps, key=lambda gap: abs(gap.predicted / gap.measured - 1))
    text = bytes_text if worst.what.startswith("bytes") else duration_text
    return _gap_text(worst, text, whole=worst.measured)


def diamonds(x: Sequence[str], y: Sequence[float | None], axes: str, name: str, unit: str) -> dict[str, Any]:
    """Return a trace of diamonds at predicted values of bars.

    Args:
        x: Categories of the bars.
        y: Predicted values; None draws nothing.
        axes: Suffix of the axes; the trace on the first axes is named in the legend.
        name: Name of the trace.
        unit: Unit of the values.
    """
    return {
        "type": "scatter", "mode": "markers", "x": list(x), "y": list(y), "xaxis": f"x{axes}", "yaxis": f"y{axes}",
        "name": name, "showlegend": not axes, "hovertemplate": f"%{{x}}, {name}: %{{y:.3s}}{unit}<extra></extra>",
        "marker": {"symbol": "diamond", "size": 10, "color": theme.GREY, "line": {"color": "#ffffff", "width": 1.5}},
    }  # fmt: skip


def _gap_text(gap: Gap, text: Any, *, whole: float) -> str:
    if abs(gap.predicted - gap.measured) < _NOT_TELLING * whole:
        return (
            f"Dashed and fainter: predicted. Predicted and measured values agree within {_NOT_TELLING:.0%}."
        )
    return (
        f"Dashed and fainter: predicted. Largest difference: {gap.what}, {text(gap.predicted)} predicted and "
        f"{text(gap.measured)} measured."
    )


# Timeline.


def timeline_ghosts(info: TimelineInfo, ghost: Ghost) -> list[dict[str, Any]]:
    """Return one row of fainter bars below the ranks: the predicted step, from the start of each measured step."""
    bars = []
    for part in dict.fromkeys((part.part, part.name) for part in ghost.parts):
        starts, lengths = [], []
        for zero in info.starts_ms:
            at = zero
            for each in ghost.parts:
                if (each.part, each.name) == part:
                    starts.append(at)
                    lengths.append(each.seconds * 1e3)
                at += each.seconds * 1e3
        bars.append(_ghost_bar(*part, starts, lengths, info.world_size))
    return bars


def _ghost_bar(part: str, name: str, starts: list[float], lengths: list[float], row: int) -> dict[str, Any]:
    look = theme.IDLE if part == IDLE else theme.span_look(name)
    return {
        "type": "bar", "orientation": "h", "base": starts, "x": lengths, "y": [row] * len(starts), "width": 0.42,
        "name": f"{PREDICTED} {collective_text(name)}", "opacity": _FAINT, "showlegend": False,
        "marker": theme.striped(look, size=5, solidity=0.22) | {"line": {"width": 1, "color": look.colour}},
        "hovertemplate": f"<b>{PREDICTED} {collective_text(name)}</b>, %{{x:.3g}} ms<extra></extra>",
    }  # fmt: skip


def with_ghost_row(info: TimelineInfo, layout: Mapping[str, Any], ghost: Ghost) -> dict[str, Any]:
    """Return the layout of a timeline with one more row, for the predicted step."""
    rows = [*layout["yaxis"]["ticktext"], f"{PREDICTED} "]
    longest = max([info.end_ms, *(start + (ghost.step_s or 0.0) * 1e3 for start in info.starts_ms)])
    axis = {"tickvals": list(range(len(rows))), "ticktext": rows, "range": [len(rows) - 0.5, -0.5]}
    return {
        **layout, "yaxis": layout["yaxis"] | axis, "xaxis": {"range": [0, longest * 1.01]},
        "height": layout["height"] + 24,
    }  # fmt: skip


def timeline_gap(trace: Trace, info: TimelineInfo, ghost: Ghost) -> str:
    """Return a sentence on the part of the step whose predicted and measured time differ most."""
    if not info.steps or not ghost.parts:
        return ""
    measured = _measured_parts(trace, info)
    predicted = {name: sum(part.seconds for part in ghost.parts if part.part == name) for name in _ORDER}
    gaps = [
        Gap(name, predicted.get(name, 0.0), measured.get(name, 0.0)) for name in {**predicted, **measured}
    ]
    worst = max(gaps, key=lambda gap: abs(gap.predicted - gap.measured))
    return _gap_text(worst, duration_text, whole=sum(measured.values()))


def _measured_parts(trace: Trace, info: TimelineInfo) -> dict[str, float]:
    """Return the time of each part of a step, as in a comparison: the mean over the shown steps and the ranks."""
    found: dict[str, list[float]] = {}
    rows = [(step, rank) for step in info.steps for rank in range(trace.world_size)]
    for step, rank in rows:
        spans = [(s.lane, s.name, s.start, s.end, 0) for s in trace.spans[step] if s.rank == rank]
        length = max(end for *_, end, _ in spans) - min(start for _, _, start, _, _ in spans)
        for (lane, name), seconds in seconds_by_part({"spans": spans, "step_time_s": length}).items():
            found.setdefault(lane if lane in {COMMUNICATION, IDLE, "codec"} else name, []).append(seconds)
    return {name: sum(seconds) / len(rows) for name, seconds in found.items()}


# Memory by type.


def memory_ghosts(trace: Trace, ghost: Ghost | None) -> tuple[StackBar, ...]:
    """Return the predicted bars of a run's ranks; empty if there are none."""
    if ghost is None or len(ghost.held) != trace.world_size:
        return ()
    return bars_of(ghost, [trace.name_of(rank) for rank in range(trace.world_size)])


def bars_of(ghost: Ghost, names: Sequence[str]) -> tuple[StackBar, ...]:
    """Return the predicted bar of each rank, up to its peak; `names` are those of the ranks."""
    peaks = ghost.held_peaks or (None,) * len(names)
    return tuple(map(StackBar, names, ghost.held, peaks))


def memory_gap(measured: Sequence[StackBar], predicted: Sequence[StackBar], names: Sequence[str]) -> str:
    """Return a sentence on the type of memory whose predicted and measured mean over the ranks differ most."""
    if not predicted or not measured:
        return ""
    gaps = [
        Gap(name, fmean(bar.sizes[at] for bar in predicted), fmean(bar.sizes[at] for bar in measured))
        for at, name in enumerate(names)
    ]
    worst = max(gaps, key=lambda gap: abs(gap.predicted - gap.measured))
    return _gap_text(worst, bytes_text, whole=fmean(bar.total for bar in measured))
