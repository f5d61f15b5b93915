"""The traces of a figure as SVG: bars, lines, markers, texts and heat maps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from math import cos, isfinite, pi, sin
from typing import Any, NamedTuple

from shardscope_widgets.kit.svg.axis import Axis
from shardscope_widgets.kit.svg.text import text_size, text_svg

Trace = Mapping[str, Any]
DASHES = {"dot": "2 3", "dash": "7 4", "longdash": "11 5", "dashdot": "7 3 2 3", "longdashdot": "11 4 2 4"}
_PATTERNS = {
    "/": "M-1 7L7 -1M-3 3L3 -3M3 9L9 3", "\\": "M-1 -1L7 7M3 -3L9 3M-3 3L3 9", "x": "M0 0L6 6M6 0L0 6",
    "-": "M0 3H6", "|": "M3 0V6", "+": "M0 3H6M3 0V6", ".": "M2 3H4",
}  # fmt: skip
_ANGLES = {
    "square": (4, 0.5, 1.25),
    "diamond": (4, 0, 1.3),
    "triangle-up": (3, 0.5, 1.2),
    "triangle-down": (3, 0, 1.2),
}
"""Markers that are regular polygons: number of corners, first corner in turns of one side, and size."""


class Bar(NamedTuple):
    """One bar: from `start` to `end` along the value axis, `width` wide around `place`, in the units of the axes."""

    place: Any
    shift: float
    width: float
    start: float
    end: float
    number: int


def is_across(trace: Trace) -> bool:
    """Return whether the bars of a trace lie horizontally."""
    return trace.get("orientation") == "h"


def bars_of(traces: Sequence[Trace], layout: Mapping[str, Any]) -> list[list[Bar]]:
    """Return the bars of each trace, stacked or side by side according to the layout; none for other traces."""
    mode = layout.get("barmode", "group")
    sums: dict[Any, float] = defaultdict(float)
    groups: dict[Any, list[str]] = defaultdict(list)
    for number, trace in enumerate(traces):
        if trace["type"] == "bar":
            groups[axes_of(trace)].append(str(trace.get("offsetgroup", number)))
    found: list[list[Bar]] = []
    for number, trace in enumerate(traces):
        bars: list[Bar] = []
        found.append(bars)
        if trace["type"] != "bar":
            continue
        places, values = plain(trace, "y"), plain(trace, "x")
        if not is_across(trace):
            places, values = values, places
        beside = list(dict.fromkeys(groups[axes_of(trace)])) if mode == "group" else [""]
        room = (1 - layout.get("bargap", 0.2)) / len(beside)
        at = beside.index(str(trace.get("offsetgroup", number))) if mode == "group" else 0
        shift = (at - (len(beside) - 1) / 2) * room
        for index, (place, value) in enumerate(zip(places, values, strict=False)):
            if value is None or place is None or not isfinite(value):
                continue
            start = each(trace.get("base"), index) or 0.0
            if mode in {"stack", "relative"}:
                key = (axes_of(trace), place, value >= 0)
                start, sums[key] = sums[key] + start, sums[key] + value
            width = each(trace.get("width"), index) or room
            offset = each(trace.get("offset"), index)
            moved = shift if offset is None else offset + width / 2
            bars.append(Bar(place, moved, width, start, start + value, index))
    return found


def plain(trace: Trace, name: str) -> list[Any]:
    """Return the values of a trace as a list; if it has none, the indices of its points."""
    values = trace.get(name)
    if values is None:
        other = trace.get("x" if name == "y" else "y")
        return list(range(len(other))) if other is not None else []
    return list(values.tolist() if hasattr(values, "tolist") else values)


def axes_of(trace: Trace) -> tuple[str, str]:
    """Return the references of a trace's axes."""
    return trace.get("xaxis") or "x", trace.get("yaxis") or "y"


def each(value: Any, index: int) -> Any:
    """Return the value for one point: `value` itself, unless it is a list."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value[index] if isinstance(value, list | tuple) and index < len(value) else value


class Marks:
    """Draws traces, and collects the definitions that they need."""

    def __init__(self, colours: Sequence[str], ink: str) -> None:
        self._colours, self._ink = colours, ink
        self.definitions: dict[str, str] = {}

    def colour(self, trace: Trace, number: int) -> str:
        """Return the main colour of a trace."""
        chosen = (trace.get("line") or {}).get("color") or each((trace.get("marker") or {}).get("color"), 0)
        return chosen if isinstance(chosen, str) else self._colours[number % len(self._colours)]

    def fill(self, colour: str, pattern: Mapping[str, Any], index: int) -> str:
        """Return the fill of a bar, with its pattern."""
        shape = each(pattern.get("shape"), index)
        if not shape:
            return colour
        name = f"p{len(self.definitions)}"
        ink = pattern.get("fgcolor") or "rgba(255,255,255,0.5)"
        body = (
            f'width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="{colour}"/>'
            f'<path d="{_PATTERNS[shape]}" stroke="{ink}"/></pattern>'
        )
        return f"url(#{self.definitions.setdefault(body, name)})"

    def bars(self, trace: Trace, bars: Sequence[Bar], x: Axis, y: Axis, number: int) -> Iterator[str]:
        """Yield the bars of a trace, and then their texts."""
        place, along = (y, x) if is_across(trace) else (x, y)
        texts: list[str] = []
        for style, alike in groupby(bars, lambda bar: self._bar_style(trace, bar.number, number)):
            yield f"<g {style}>"
            for bar in alike:
                at = place.number(bar.place) + bar.shift
                a, b = sorted((place.pixel(at - bar.width / 2), place.pixel(at + bar.width / 2)))
                low = along.at(bar.start) if not along.is_log or bar.start > 0 else along.pixels[0]
                c, d = sorted((low, along.at(bar.end)))
                left, top, wide, high = (c, a, d - c, b - a) if is_across(trace) else (a, c, b - a, d - c)
                yield f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}"/>'
                texts += self._bar_text(trace, bar, (left, top, wide, high), is_at_end=bar.end >= bar.start)
            yield "</g>"
        yield from texts

    def _bar_style(self, trace: Trace, at: int, number: int) -> str:
        marker = trace.get("marker") or {}
        line = marker.get("line") or {}
        fill = self.fill(
            each(marker.get("color"), at) or self.colour(trace, number), marker.get("pattern") or {}, at
        )
        faint = each(marker.get("opacity"), at) or trace.get("opacity") or 1
        wide = each(line.get("width"), at)
        edge = f' stroke="{each(line.get("color"), at)}" stroke-width="{wide:g}"' if wide else ""
        opacity = f' opacity="{faint:g}"' if faint < 1 else ""
        return f'fill="{fill}"{edge}{opacity}'

    def _bar_text(
        self, trace: Trace, bar: Bar, box: tuple[float, float, float, float], *, is_at_end: bool
    ) -> Iterator[str]:
        text, place = (
            each(trace.get("text"), bar.number),
            each(trace.get("textposition"), bar.number) or "auto",
        )
        if not isinstance(text, str) or not text or place == "none":
            return
        left, top, wide, high = box
        font = {
            **(trace.get("textfont") or {}),
            **((trace.get("insidetextfont") or {}) if place != "outside" else {}),
        }
        size = each(font.get("size"), bar.number) or 12
        need = text_size(text, size)
        fits = need[0] <= wide and need[1] <= high + 3
        if place != "outside" and fits:
            ink = each(font.get("color"), bar.number) or "#ffffff"
            yield text_svg(text, left + wide / 2, top + high / 2, size=size, colour=ink, anchor="middle")
        elif place != "inside":
            ink = (
                each((trace.get("outsidetextfont") or trace.get("textfont") or {}).get("color"), bar.number)
                or self._ink
            )
            x, y, anchor, up = left + wide / 2, top - 2, "middle", 1.0
            if is_across(trace):
                x, y, up = (left + wide + 4 if is_at_end else left - 4), top + high / 2, 0.5
                anchor = "start" if is_at_end else "end"
            yield text_svg(text, x, y, size=size, colour=ink, anchor=anchor, up=up)

    def points(self, trace: Trace, x: Axis, y: Axis, number: int) -> Iterator[str]:
        """Yield the lines, areas, markers and texts of a scatter trace."""
        values = list(zip(plain(trace, "x"), plain(trace, "y"), strict=False))
        mode = trace.get("mode") or ("lines+markers" if len(values) < 20 else "lines")
        places = [(x.at(a), y.at(b)) for a, b in values]
        colour = self.colour(trace, number)
        group = f'<g opacity="{trace["opacity"]:g}">' if (trace.get("opacity") or 1) < 1 else ""
        yield group
        line = trace.get("line") or {}
        shape = line.get("shape", "linear")
        if trace.get("fill") in {"tozeroy", "toself"}:
            yield from self._area(trace, places, y, shape, colour)
        if "lines" in mode:
            dash = DASHES.get(line.get("dash", ""), line.get("dash", ""))
            style = f' stroke-dasharray="{dash}"' if dash and dash != "solid" else ""
            path = "".join(map(_path, _pieces(places), [shape] * len(places)))
            if path:
                yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{line.get("width", 2):g}"{style}/>'
        yield from self._errors(trace, values, x, y, colour)
        for index, (px, py) in enumerate(places):
            if not (isfinite(px) and isfinite(py)):
                continue
            if "markers" in mode:
                yield self._marker(trace, index, px, py, colour)
            text = each(trace.get("text"), index)
            if "text" in mode and text:
                yield self._point_text(trace, str(text), index, px, py)
        yield "</g>" * bool(group)

    def _area(
        self, trace: Trace, places: Sequence[tuple[float, float]], y: Axis, shape: str, colour: str
    ) -> Iterator[str]:
        paint = trace.get("fillcolor") or colour
        faint = "" if trace.get("fillcolor") else ' opacity="0.5"'
        for piece in _pieces(places):
            floor = y.pixels[0] if y.is_log else y.pixel(0)
            ends = f"V{floor:.1f}H{piece[0][0]:.1f}Z" if trace["fill"] == "tozeroy" else "Z"
            yield f'<path d="{_path(piece, shape)}{ends}" fill="{paint}"{faint}/>'

    def _errors(
        self, trace: Trace, values: Sequence[tuple[Any, Any]], x: Axis, y: Axis, colour: str
    ) -> Iterator[str]:
        for name in ("error_x", "error_y"):
            error = trace.get(name) or {}
            if error.get("array") is None:
                continue
            for index, (a, b) in enumerate(values):
                over = each(error["array"], index) or 0
                under = each(error.get("arrayminus"), index) if error.get("arrayminus") is not None else over
                ends = (
                    ((a - (under or 0), b), (a + over, b))
                    if name == "error_x"
                    else ((a, b - (under or 0)), (a, b + over))
                )
                (x0, y0), (x1, y1) = ((x.at(c), y.at(d)) for c, d in ends)
                if all(map(isfinite, (x0, y0, x1, y1))):
                    yield (
                        f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{error.get("color") or colour}" '
                        f'stroke-width="{error.get("thickness") or 2:g}"/>'
                    )

    def _marker(self, trace: Trace, index: int, x: float, y: float, colour: str) -> str:
        marker = trace.get("marker") or {}
        symbol, radius = (
            str(each(marker.get("symbol"), index) or "circle"),
            (each(marker.get("size"), index) or 6) / 2,
        )
        own = each(marker.get("color"), index)
        if isinstance(own, int | float) and isfinite(own) and "colorscale" in marker:
            own = between(
                marker["colorscale"], (own - marker["cmin"]) / ((marker["cmax"] - marker["cmin"]) or 1)
            )
        paint = own if isinstance(own, str) else colour
        edge = marker.get("line") or {}
        wide = each(edge.get("width"), index) or 0
        ink = each(edge.get("color"), index) or self._ink
        shape = symbol.removesuffix("-open").removesuffix("-thin")
        if symbol.endswith("-open") or shape in {"x", "cross", "line-ns", "line-ew"}:
            style = f'fill="none" stroke="{paint}" stroke-width="{max(wide, 1.5):g}"'
        else:
            style = f'fill="{paint}"' + (f' stroke="{ink}" stroke-width="{wide:g}"' if wide else "")
        faint = each(marker.get("opacity"), index)
        if faint is not None and faint < 1:
            style += f' opacity="{faint:g}"'
        if shape == "circle":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" {style}/>'
        return f'<path d="{_outline(shape, x, y, radius)}" {style}/>'

    def _point_text(self, trace: Trace, text: str, index: int, x: float, y: float) -> str:
        font, place = (
            trace.get("textfont") or {},
            str(each(trace.get("textposition"), index) or "middle center"),
        )
        size, gap = each(font.get("size"), index) or 12, 5 if "markers" in str(trace.get("mode")) else 2
        left, right = "left" in place, "right" in place
        top, bottom = "top" in place, "bottom" in place
        anchor, moved = ("end", -gap) if left else ("start", gap) if right else ("middle", 0)
        up, risen = (1.0, -gap) if top else (0.0, gap) if bottom else (0.5, 0)
        ink = each(font.get("color"), index) or self._ink
        return text_svg(text, x + moved, y + risen, size=size, colour=ink, anchor=anchor, up=up)

    def heat_map(self, trace: Trace, x: Axis, y: Axis) -> Iterator[str]:
        """Yield the cells of a heat map, whose `x` and `y` are the edges or the centres of its cells."""
        rows = [list(row) for row in trace["z"]]
        if not rows:
            return
        across, down = (_edges(plain(trace, name), n) for name, n in (("x", len(rows[0])), ("y", len(rows))))
        low, high = trace["zmin"], trace["zmax"]
        gap_x, gap_y = trace.get("xgap") or 0, trace.get("ygap") or 0
        texts = trace.get("text") if trace.get("texttemplate") else None
        for at, row in enumerate(rows):
            for column, value in enumerate(row):
                if value is None or not isfinite(value):
                    continue
                x0, x1 = sorted((x.pixel(across[column]), x.pixel(across[column + 1])))
                y0, y1 = sorted((y.pixel(down[at]), y.pixel(down[at + 1])))
                colour = _on_scale(trace["colorscale"], (value - low) / ((high - low) or 1))
                yield (
                    f'<rect x="{x0 + gap_x / 2:.1f}" y="{y0 + gap_y / 2:.1f}" width="{x1 - x0 - gap_x:.1f}" '
                    f'height="{y1 - y0 - gap_y:.1f}" fill="{colour}"/>'
                )
                if texts is not None and texts[at][column]:
                    ink = (trace.get("textfont") or {}).get("color") or "#10151b"
                    size = min(12.0, (trace.get("textfont") or {}).get("size") or 12, (x1 - x0) / 2)
                    yield text_svg(
                        texts[at][column],
                        (x0 + x1) / 2,
                        (y0 + y1) / 2,
                        size=size,
                        colour=ink,
                        anchor="middle",
                    )


def _edges(places: Sequence[Any], count: int) -> list[float]:
    if len(places) == count + 1:
        return [float(place) for place in places]
    return [at - 0.5 for at in range(count + 1)]


def _on_scale(scale: Sequence[Sequence[Any]], share: float) -> str:
    """Return the colour at a fraction of a colour scale made of steps."""
    return str(next((colour for at, colour in reversed(scale) if at <= share + 1e-9), scale[0][1]))


def between(scale: Sequence[Sequence[Any]], share: float) -> str:
    """Return the colour at a fraction of a continuous colour scale of hexadecimal colours."""
    share = min(max(share, 0.0), 1.0)
    (low, first), (high, last) = next(ends for ends in pairwise(scale) if ends[1][0] >= share)
    part = (share - low) / ((high - low) or 1)
    rgb = (int(colour[at : at + 2], 16) for at in (1, 3, 5) for colour in (first, last))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(rgb, rgb, strict=True))


def _pieces(places: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return the sequences of points between gaps."""
    found: list[list[tuple[float, float]]] = [[]]
    for place in places:
        if isfinite(place[0]) and isfinite(place[1]):
            found[-1].append(place)
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def _path(places: Sequence[tuple[float, float]], shape: str) -> str:
    (x, y), *rest = places
    path = f"M{x:.1f} {y:.1f}"
    for x, y in rest:
        path += {"hv": f"H{x:.1f}V{y:.1f}", "vh": f"V{y:.1f}H{x:.1f}"}.get(shape, f"L{x:.1f} {y:.1f}")
    return path


def _outline(shape: str, x: float, y: float, radius: float) -> str:
    """Return the path of a marker."""
    lines = {
        "x": [(-1, -1, 1, 1), (-1, 1, 1, -1)], "cross": [(-1, 0, 1, 0), (0, -1, 0, 1)], "line-ns": [(0, -1, 0, 1)],
        "line-ew": [(-1, 0, 1, 0)],
    }.get(shape)  # fmt: skip
    if lines is not None:
        ends = [tuple(radius * 0.8 * end for end in line) for line in lines]
        return "".join(f"M{x + a:.1f} {y + b:.1f}L{x + c:.1f} {y + d:.1f}" for a, b, c, d in ends)
    sides, first, scale = (10, 0.5, 1.2) if shape == "star" else _ANGLES[shape]
    turns = [2 * pi * ((at + first) / sides + (0.25 if shape != "star" else -0.3)) for at in range(sides)]
    sizes = [radius * scale * (0.45 if shape == "star" and at % 2 else 1) for at in range(sides)]
    corners = [(x + size * cos(turn), y + size * sin(turn)) for turn, size in zip(turns, sizes, strict=True)]
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in corners) + "Z"
