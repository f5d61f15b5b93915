"""Step time against link bandwidth, with one line per compression method and one without compression.

Where a method's line crosses the uncompressed line, both steps take equally long. Compression pays off where a method
gains more than the prediction error; a band marks the bandwidths with smaller gains, up to the crossing. Methods whose
loss increase exceeds their tolerance are grey. Crosses are measured steps. The slider below the plot moves the vertical
line, “my link”, also without a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf, log, log10
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from shardscope.measure.compression.curve import ERROR, PredictedStep, Worth, below_text
from shardscope.measure.compression.loss_increase import loss_text
from shardscope.measure.compression.stated import stated_speedup
from shardscope.spec import Link
from shardscope.spec.units import bit_rate_text, faster_text
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._communication import CommunicationQuestion
from shardscope_widgets.figures._communication_look import log_ticks, tick_seconds
from shardscope_widgets.figures.theme import method_look
from shardscope_widgets.words import duration_text

_POINTS = 81
_FARTHEST = 100.0
"""Crossings at bandwidths that exceed all others by this factor are left out, to keep the axis short."""
_HERE = "#d1495b"
_ALIKE = 0.03
"""Largest relative difference of lines that lie on each other."""
_PLOT_PX, _LETTER_PX = (340.0, 300.0), (6.0, 14.0)
"""Width and height of a small plot, so that names fit in all, and of a letter of a name in it."""


class SpeedLine(NamedTuple):
    """Predicted step time of one method, in seconds, by bandwidth.

    It gains more than the error of predictions below `pays_below` or above `pays_above`, and its line crosses the
    uncompressed one at `crossing`, from which on it gains if it saves messages instead of bytes; all in bytes per
    second (see `Worth`). `refusal` describes its loss increase if that exceeds the tolerance.
    """

    label: str
    name: str
    seconds: tuple[float, ...]
    pays_below: float
    crossing: float
    refusal: str = ""
    pays_above: float = inf


class SpeedPoint(NamedTuple):
    """A measured step: method, bandwidth in bytes per second, step time in seconds."""

    label: str
    name: str
    bandwidth: float
    step_s: float


class CompressionSpeedupInfo(NamedTuple):
    """The lines over `bandwidths`, in bytes per second, the uncompressed line first, and the marked bandwidths.

    Compression pays off below `threshold`, and up to `crossing` it gains less than the error of predictions; both are 0
    if compression never gains anything, and may be infinite. `here` is the bandwidth of the link, and `said` has a
    sentence for each bandwidth.
    """

    of: str
    bandwidths: tuple[float, ...]
    lines: tuple[SpeedLine, ...]
    points: tuple[SpeedPoint, ...]
    here: float
    said: tuple[str, ...]
    threshold: float
    crossing: float
    text: str


def worth_of(question: CommunicationQuestion) -> Worth:
    """Return the steps with and without compression of workers with given properties, which sum their gradients over a
    ring.
    """
    return stated_speedup(
        question.num_bytes, question.workers, Link(bandwidth=question.bandwidth, latency_s=question.latency),
        compute_s=question.compute_s, codec_bandwidth=question.codec_bandwidth,
    )  # fmt: skip


def compression_speedup_info(
    found: Worth | CommunicationQuestion, *, slides: bool = True
) -> CompressionSpeedupInfo:
    """Return the data of the figure.

    Args:
        found: Result of `ss.compression_speedup`, or workers with a stated compute time, link and speed of packing.
        slides: Whether a slider moves the line “my link”, which needs a sentence for each bandwidth.
    """
    worth = found if isinstance(found, Worth) else worth_of(found)
    threshold = worth.threshold
    rates = _bandwidths(worth)
    worths = [worth.at(rate) for rate in rates]
    lines = [
        SpeedLine(
            step.compression.label if step.compression.is_on else "uncompressed",
            step.compression.name,
            tuple(each.steps[index].step_s for each in worths),
            worth.pays_below(step) if step.compression.is_on else 0.0,
            _crossing(worth, step) if step.compression.is_on else 0.0,
            "" if worth.is_harmless(step) else loss_text(step.compression, worth.optimizer),
            worth.pays_above(step),
        )
        for index, step in enumerate(worth.steps)
    ]
    lines[1:] = sorted(lines[1:], key=lambda line: (bool(line.refusal), -line.pays_below))
    points = [
        SpeedPoint(each.compression.label, each.compression.name, each.bandwidth, each.step_s)
        for each in sorted(worth.measured, key=lambda each: each.step_s)
    ]
    return CompressionSpeedupInfo(
        worth.of, tuple(rates), tuple(lines), tuple(points), worth.link.bandwidth,
        tuple(_here_text(each) for each in worths if slides),
        0.0 if threshold is None else threshold.below, 0.0 if threshold is None else threshold.crossing,
        " ".join(worth.sentences),
    )  # fmt: skip


def _crossing(worth: Worth, step: PredictedStep) -> float:
    """Return the bandwidth at which a step takes as long as the uncompressed one; 0 or infinite if there is none."""
    above = worth.pays_above(step, margin=1.0)
    return worth.crossing(step) if above == inf else above


def _bandwidths(worth: Worth) -> list[float]:
    """Return bandwidths, evenly spaced on a logarithmic axis, around the link, all crossings and all measurements."""
    packed = [step for step in worth.harmless if step.compression.is_on]
    marks = [
        worth.link.bandwidth,
        *map(worth.pays_below, packed),
        *(each.bandwidth for each in worth.measured),
    ]
    known = [mark for mark in marks if 0 < mark < inf]
    crossings = [level for step in packed if (level := _crossing(worth, step)) < max(known) * _FARTHEST]
    low, high = min(known) / 4, max([*known, *crossings]) * 4
    rates = np.geomspace(low, high, _POINTS)
    rates[np.argmin(np.abs(np.log(rates / worth.link.bandwidth)))] = worth.link.bandwidth
    return [float(rate) for rate in rates]


def _here_text(worth: Worth) -> str:
    """Return two lines on the chosen link: the fastest method within its tolerance, and its gain over the
    uncompressed step.
    """
    chosen, plain, link = worth.recommended, worth.plain, bit_rate_text(worth.link.bandwidth)
    if not chosen.compression.is_on:
        return f"{link}:<br>{duration_text(plain.step_s)} per step, uncompressed"
    name, gain = chosen.compression.label, faster_text(worth.speedup(chosen))
    if not worth.pays:
        return f"{link}:<br>{gain} with {name}, below {ERROR}"
    return f"{link}:<br>{duration_text(chosen.step_s)} with {name} instead of {duration_text(plain.step_s)} ({gain})"


def compression_speedup_text(info: CompressionSpeedupInfo) -> str:
    """Return sentences on the bandwidth below which compression pays off, its effect on the link, and the measured
    steps.
    """
    return info.text


def speedup_traces(info: CompressionSpeedupInfo) -> list[dict[str, Any]]:
    """Return the lines, and marks at crossings and at measured steps."""
    refused = [line for line in info.lines if line.refusal]
    return [
        *(_line(info, line) for line in info.lines if not line.refusal),
        *_refused_lines(info, refused),
        _crossings(info),
        *_points(info),
    ]


def speedup_layout(info: CompressionSpeedupInfo) -> dict[str, Any]:
    """Return axes, “my link”, the threshold, and the band of gains below the prediction error."""
    shapes: list[dict[str, Any]] = [theme.rule(_HERE, x=8 * info.here, width=2, dash="solid")]
    notes = [_note("my link", info.here, 1.0, _HERE)]
    if info.threshold < info.crossing:
        ends = info.threshold or info.bandwidths[0], min(info.crossing, info.bandwidths[-1])
        shapes.append(_band(*ends))
        notes.append(
            _note("gain below the<br>prediction error", ends[0], 0.0, theme.GREY)
            | {"xanchor": "left", "xshift": 4}
        )
    if info.bandwidths[-1] < info.crossing < inf:
        notes.append(
            _note(f"equal at {bit_rate_text(info.crossing)} →", info.bandwidths[-1], 0.0, theme.GREY)
        )
        notes[-1] |= {"xanchor": "right", "xshift": -4}
    if 0 < info.threshold < inf:
        shapes.append(theme.rule(theme.AXIS, x=8 * info.threshold, width=1.4, dash="dot"))
        text = f"<b>pays off below<br>{bit_rate_text(info.threshold)}</b>"
        notes.append(_note(text, info.threshold, 0.0, theme.GREY) | {"xanchor": "right", "xshift": -4})
    low, high = _seconds_range(info)
    first, last = 8 * info.bandwidths[0], 8 * info.bandwidths[-1]
    x = log_ticks(first, last, lambda bits: bit_rate_text(bits / 8)) | {"range": [log10(first), log10(last)]}
    y = log_ticks(low, high, tick_seconds) | {"range": [log10(low), log10(high)]}
    return {
        "xaxis": theme.axis("bandwidth of a rank's link", **x), "yaxis": theme.axis("time per step", **y),
        "shapes": shapes, "annotations": notes, "sliders": [_slider(info)] if info.said else [], "showlegend": True,
        "height": 536 if info.said else 440, "margin": {"l": 8, "r": theme.MODEBAR_WIDTH, "t": 96, "b": 8},
        "legend": theme.LEGEND_ABOVE | {"entrywidth": 170},
    }  # fmt: skip


def _seconds_range(info: CompressionSpeedupInfo) -> tuple[float, float]:
    values = [value for line in info.lines for value in line.seconds]
    values += [point.step_s for point in info.points]
    return min(values) / 1.5, max(values) * 1.3


def draw_compression_speedup(info: CompressionSpeedupInfo) -> go.Figure:
    """Draw the curves; see `compression_speedup`."""
    return theme.style(go.Figure(speedup_traces(info)), **speedup_layout(info))


def _line(info: CompressionSpeedupInfo, line: SpeedLine) -> dict[str, Any]:
    look, name = method_look(line.name), line.label
    style = {"color": look.colour, "dash": look.dash, "width": 2.2}
    if line is info.lines[0]:
        style = {"color": theme.GREY, "dash": "solid", "width": 3.2}
    else:
        name = f"{line.label}, {below_text(line.pays_below, line.pays_above)}"
    return _curve(info, line, style) | {"name": name}


def _refused_lines(info: CompressionSpeedupInfo, lines: Sequence[SpeedLine]) -> Iterator[dict[str, Any]]:
    """Yield the grey lines of methods whose loss is too high, with their names; they share an entry of the legend.

    Lines that lie on each other have one name together, and names are where no other name is.
    """
    named: dict[SpeedLine, list[str]] = {}
    for line in lines:
        named.setdefault(next((one for one in named if _is_alike(one, line)), line), []).append(line.label)
    texts = {line: ", ".join(labels) for line, labels in named.items()}
    places = _free_places(info, texts)
    for number, line in enumerate(lines):
        place = places.get(line)
        shown = [texts[line] if place and at == place.at else "" for at in range(len(info.bandwidths))]
        side = "top right" if place is None or place.is_above else "bottom left"
        yield _curve(info, line, {"color": theme.GREY, "dash": "dot", "width": 1.1}) | {
            "name": "loss too high", "opacity": 0.6, "legendgroup": "refused", "showlegend": not number,
            "mode": "lines+text", "text": shown, "textposition": side, "textfont": {"color": theme.GREY, "size": 10},
        }  # fmt: skip


def _is_alike(one: SpeedLine, other: SpeedLine) -> bool:
    return all(abs(log(a / b)) <= _ALIKE for a, b in zip(one.seconds, other.seconds, strict=True))


class _Place(NamedTuple):
    """Where a text of a number of points is: to the upper right of a point of its line, or to the lower left."""

    at: int
    width: int
    is_above: bool

    @property
    def points(self) -> slice:
        """The points of the axis that the text covers."""
        return slice(self.at, self.at + self.width) if self.is_above else slice(self.at - self.width, self.at)


def _free_places(info: CompressionSpeedupInfo, texts: Mapping[SpeedLine, str]) -> dict[SpeedLine, _Place]:
    """Return for each line the place of its text that covers the fewest other texts and lines."""
    low, high = _seconds_range(info)
    heights = {line: _PLOT_PX[1] / log(high / low) * np.log(line.seconds) for line in info.lines}
    num_points, letter = len(info.bandwidths), _LETTER_PX[1]
    places = dict[SpeedLine, _Place]()

    def bottom(line: SpeedLine, place: _Place) -> float:
        return float(heights[line][place.at]) - (0 if place.is_above else letter)

    def covered(line: SpeedLine, place: _Place) -> int:
        base, points = bottom(line, place), place.points
        near = [each.points for other, each in places.items() if abs(base - bottom(other, each)) < letter]
        texts_over = [bool(points.start < each.stop and each.start < points.stop) for each in near]
        gaps = (heights[each][points] - base for each in info.lines if not _is_alike(line, each))
        lines_over = [bool(np.any((gap > 0) & (gap < letter))) for gap in gaps]
        return len(info.lines) * sum(texts_over) + sum(lines_over)

    for line, text in texts.items():
        width = ceil(len(text) * _LETTER_PX[0] / _PLOT_PX[0] * num_points)
        half = num_points // 2  # where lines are apart
        free = [_Place(at, width, is_above=True) for at in range(2, half)]
        free += [_Place(at, width, is_above=False) for at in range(width + 1, half)]
        places[line] = min(free, key=lambda place, line=line: covered(line, place))  # type: ignore[misc]
    return places


def _curve(info: CompressionSpeedupInfo, line: SpeedLine, style: dict[str, Any]) -> dict[str, Any]:
    about = f"{line.label} ({line.refusal})" if line.refusal else line.label
    return {
        "type": "scatter", "mode": "lines", "x": [8 * rate for rate in info.bandwidths], "y": list(line.seconds),
        "line": style, "customdata": list(map(bit_rate_text, info.bandwidths)),
        "hovertemplate": f"<b>{about}</b><br>%{{y:.3~s}}s at %{{customdata}}<extra></extra>",
    }  # fmt: skip


def _crossings(info: CompressionSpeedupInfo) -> dict[str, Any]:
    """Return marks where methods' lines cross the uncompressed line; only the last mark is labelled with its
    bandwidth.
    """
    shown = info.bandwidths[-1]
    lines = [line for line in info.lines[1:] if 0 < line.crossing < shown and not line.refusal]
    places, rates = [line.crossing for line in lines], np.log(info.bandwidths)
    seconds = [
        float(np.exp(np.interp(np.log(each), rates, np.log(info.lines[0].seconds)))) for each in places
    ]
    last = max(places, default=0.0)
    return {
        "type": "scatter", "mode": "markers+text", "showlegend": False, "x": [8 * each for each in places],
        "y": seconds, "text": [bit_rate_text(each) if each == last else "" for each in places],
        "textposition": "top center", "textfont": {"color": theme.GREY},
        "marker": {
            "symbol": "circle", "size": 10, "color": [method_look(line.name).colour for line in lines],
            "line": {"color": "#fff", "width": 1.5},
        },
        "hovertext": [f"{line.label} and uncompressed: equal at {bit_rate_text(line.crossing)}" for line in lines],
        "hoverinfo": "text",
    }  # fmt: skip


def _points(info: CompressionSpeedupInfo) -> list[dict[str, Any]]:
    """Return the marks of measured steps; marks that nearly touch have one label together."""
    low, high = _seconds_range(info)
    near = (high / low) ** (_LETTER_PX[1] / _PLOT_PX[1])
    groups: list[list[SpeedPoint]] = []
    for point in info.points:
        before = groups[-1][-1] if groups else point
        is_near = point.bandwidth == before.bandwidth and point.step_s < before.step_s * near
        if groups and is_near:
            groups[-1].append(point)
        else:
            groups.append([point])
    drawn = [
        _point(info, point, ", ".join(map(_measured_label, group)) if point is group[-1] else "")
        for group in groups
        for point in group
    ]
    return [mark | {"showlegend": not number} for number, mark in enumerate(drawn)]


def _measured_label(point: SpeedPoint) -> str:
    return "uncompressed" if point.name == "none" else point.label


def _point(info: CompressionSpeedupInfo, point: SpeedPoint, label: str) -> dict[str, Any]:
    """Return the mark of a measured step, with its label to the right, or to the left where the plot would cut it."""
    first, last = info.bandwidths[0], info.bandwidths[-1]
    room = _PLOT_PX[0] * log(last / point.bandwidth) / log(last / first)
    side = "right" if _LETTER_PX[0] * (len(label) + 2) <= room else "left"
    colour = theme.GREY if point.name == "none" else method_look(point.name).colour
    text = f"measured, {_measured_label(point)}: {duration_text(point.step_s)} on {bit_rate_text(point.bandwidth)}"
    return {
        "type": "scatter", "mode": "markers+text", "x": [8 * point.bandwidth], "y": [point.step_s],
        "name": "measured", "legendgroup": "measured",
        "text": [label], "textposition": f"middle {side}", "textfont": {"color": theme.GREY},
        "marker": {"symbol": "x", "size": 11, "color": colour, "line": {"color": "#fff", "width": 1}},
        "hovertext": text, "hoverinfo": "text",
    }  # fmt: skip


def _note(text: str, bandwidth: float, y: float, colour: str) -> dict[str, Any]:
    return {
        "text": text, "x": log10(8 * bandwidth), "y": y, "xref": "x", "yref": "paper", "showarrow": False,
        "xanchor": "center", "yanchor": "bottom", "font": {"size": 12, "color": colour},
    }  # fmt: skip


def _band(low: float, high: float) -> dict[str, Any]:
    """Return the area in which the gain is below the error of predictions."""
    return {
        "type": "rect", "xref": "x", "yref": "paper", "x0": 8 * low, "x1": 8 * high, "y0": 0, "y1": 1, "layer": "below",
        "fillcolor": theme.GRID, "line": {"width": 0},
    }  # fmt: skip


def _slider(info: CompressionSpeedupInfo) -> dict[str, Any]:
    """Return a slider as wide as the plot that moves “my link”."""
    active = int(np.argmin(np.abs(np.log(info.bandwidths) - np.log(info.here))))
    steps = [
        {
            "label": said, "method": "relayout",
            "args": [{"shapes[0].x0": 8 * rate, "shapes[0].x1": 8 * rate, "annotations[0].x": log10(8 * rate)}],
        }
        for rate, said in zip(info.bandwidths, info.said, strict=True)
    ]  # fmt: skip
    return {
        "active": active, "steps": steps, "x": 0, "len": 1, "xanchor": "left", "y": 0, "yanchor": "top",
        "pad": {"t": 52, "b": 0, "l": 0, "r": 0}, "ticklen": 0, "minorticklen": 0, "bgcolor": theme.GRID,
        "bordercolor": theme.AXIS, "activebgcolor": _HERE, "font": {"color": "rgba(0,0,0,0)", "size": 1},
        "currentvalue": {"prefix": "my link, ", "font": {"color": theme.GREY, "size": 13}, "offset": 10},
    }  # fmt: skip


def compression_speedup(found: Worth | CommunicationQuestion) -> go.Figure:
    """Draw step time against bandwidth for each compression method, with crossings, measured steps and your own link.

    Args:
        found: Result of `ss.compression_speedup`, or workers with a stated compute time, link and speed of packing.
    """
    return draw_compression_speedup(compression_speedup_info(found))
