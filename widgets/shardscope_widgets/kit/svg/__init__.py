"""Plotly figures as SVG, drawn without a browser, for notebooks that are read without a kernel.

It draws what the panels' figures use: bars, lines, markers, texts and heat maps on linear, logarithmic and category
axes, with shapes, annotations and horizontal legends. Images have no hover texts. Figures have a transparent background
and grey text, so an image can be read on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

from shardscope_widgets.figures import theme
from shardscope_widgets.kit.svg.axis import Axis
from shardscope_widgets.kit.svg.marks import DASHES, Marks, axes_of, bars_of, is_across, plain
from shardscope_widgets.kit.svg.text import DEFAULT, text_size, text_svg

WIDTH = 860
"""Width of an image in pixels, about that of a notebook's cell."""
KEY, ROW = 11, 15
"""Font size of a legend, and height of its rows, in pixels."""
_COLOURS = ("#636efa", "#EF553B", "#00cc96", "#ab63fa", "#FFA15A", "#19d3f3", "#FF6692", "#B6E880")
"""Plotly's default colours of traces."""


def figure_svg(figure: Mapping[str, Any], *, width: int = WIDTH, label: str = "") -> str:
    """Return a figure as an SVG document.

    Args:
        figure: Data and layout as Plotly JSON.
        width: Width in pixels; the height is the layout's.
        label: Name of the figure for screen readers.

    Raises:
        ValueError: The figure has a trace of a type that is not drawn.
    """
    return _Drawing(figure, width, label).svg()


class Legend(NamedTuple):
    """A legend: its title, and rows of entries, each with its left edge and the index of its trace."""

    title: str
    rows: list[list[tuple[float, int]]]
    is_below: bool


class _Drawing:
    def __init__(self, figure: Mapping[str, Any], width: int, label: str) -> None:
        self.layout: Mapping[str, Any] = figure["layout"]
        self.traces = [trace for trace in figure["data"] if trace.get("visible", True) is True]
        unknown = {trace["type"] for trace in self.traces} - {"bar", "scatter", "heatmap"}
        if unknown:
            raise ValueError(f"traces of type {', '.join(sorted(unknown))} cannot be drawn as SVG")
        self.width, self.height, self.label = width, int(self.layout.get("height") or 400), label
        self.font = self.layout.get("font") or {}
        self.ink = str(self.font.get("color") or theme.GREY)
        self.marks = Marks(self.layout.get("colorway") or _COLOURS, self.ink)
        self.bars = bars_of(self.traces, self.layout)
        self.axes = self._axes()
        self.legends = self._legends()
        self.above = self._room_above()
        self.height += self.above
        self.box = self._place()

    # Axes and margins.

    def _axes(self) -> dict[str, Axis]:
        used = dict.fromkeys(name for trace in self.traces for name in axes_of(trace)) or {
            "x": None,
            "y": None,
        }
        values: dict[str, list[Any]] = {name: [] for name in used}
        for trace, bars in zip(self.traces, self.bars, strict=True):
            x, y = axes_of(trace)
            if trace["type"] == "bar":
                place, along = (y, x) if is_across(trace) else (x, y)
                values[along] += [end for bar in bars for end in (bar.start, bar.end)]
                for bar in bars:
                    is_name = isinstance(bar.place, str)
                    ends = (bar.shift - bar.width / 2, bar.shift + bar.width / 2)
                    values[place] += [bar.place] if is_name else [bar.place + end for end in ends]
                continue
            values[x] += plain(trace, "x")
            values[y] += plain(trace, "y")
        for name in used:  # an axis that matches another one has its range
            other = self._settings(name).get("matches")
            if other in values:
                values[other] = values[name] = [*values[other], *values[name]]
        return {
            name: Axis(name, self._settings(name), values[name], is_padded=self._is_padded(name))
            for name in used
        }

    def _is_padded(self, name: str) -> bool:
        """Return whether an axis ends beyond its values: beyond markers, and above and below lines."""
        modes = [
            str(trace.get("mode"))
            for trace in self.traces
            if trace["type"] == "scatter" and name in axes_of(trace)
        ]
        return any(name.startswith("y") or "markers" in mode for mode in modes)

    def _settings(self, name: str) -> Mapping[str, Any]:
        return self.layout.get(f"{name[0]}axis{name[1:]}") or {}

    def _place(self) -> tuple[float, float, float, float]:
        """Assign pixels to each axis, leaving margins for the labels, and return the box around all plots."""
        margin = {"l": 80, "r": 80, "t": 100, "b": 80} | dict(self.layout.get("margin") or {})
        left, bottom = float(margin["l"]), float(self.height - margin["b"])
        top, right = margin["t"] + self.above, self.width - max(12, margin["r"] - 8)
        for _ in range(2):  # labels depend on the room, and the room on the labels
            for axis in self.axes.values():
                first, span = (left, right - left) if axis.is_x else (bottom, top - bottom)
                low, high = axis.domain
                axis.pixels = (first + low * span, first + high * span)
            rooms = [(axis.is_x, self._room(axis)) for axis in self.axes.values() if self._is_at_edge(axis)]
            before = left, top, right, bottom
            left = max([margin["l"], *(room + 4 for is_x, room in rooms if not is_x)])
            bottom = self.height - max([margin["b"], *(room + 4 for is_x, room in rooms if is_x)])
        self._keep_square()
        return before

    def _room(self, axis: Axis) -> float:
        across, down = axis.label_room()
        size = down if axis.is_x else across
        return size + 6 * bool(size) + (DEFAULT * 1.5 if axis.title else 0)

    def _is_at_edge(self, axis: Axis) -> bool:
        """Return whether the labels of an axis are beside the box of all plots, on the left or below."""
        other = self.axes.get(str(axis.settings.get("anchor") or "xy".replace(axis.name[0], "")))
        return axis.settings.get("side") not in {"right", "top"} and (other is None or other.domain[0] == 0)

    def _keep_square(self) -> None:
        """Give axes that must share a scale the smaller of their scales."""
        for axis in self.axes.values():
            other = self.axes.get(str(axis.settings.get("scaleanchor")))
            if other is None:
                continue
            both = (axis, other)
            scale = min(abs((a.pixels[1] - a.pixels[0]) / (a.range[1] - a.range[0])) for a in both)
            for a in both:
                room = scale * abs(a.range[1] - a.range[0])
                is_up = a.settings.get("constraintoward") in {"top", "right"}
                first, last = a.pixels
                way = 1 if last > first else -1
                a.pixels = (last - way * room, last) if is_up else (first, first + way * room)

    # Drawing.

    def svg(self) -> str:
        below, above = (list(self._shapes(layer)) for layer in ("below", "above"))
        plots, grids = list(self._plots()), list(self._grids())
        names = [*self._keys(), *self._annotations()]
        clips = "".join(
            f'<clipPath id="c{at}">{self._rect(pair)}</clipPath>' for at, pair in enumerate(self._pairs())
        )
        patterns = "".join(f'<pattern id="{name}" {body}' for body, name in self.marks.definitions.items())
        family = escape(str(self.font.get("family") or theme.FONT))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="{family}" font-size="{DEFAULT}" fill="{self.ink}">'
        )
        title = f"<title>{escape(self.label)}</title>" if self.label else ""
        return "".join(
            [head, title, f"<defs>{clips}{patterns}</defs>", *below, *grids, *plots, *above, *names, "</svg>"]
        )

    def _pairs(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys(map(axes_of, self.traces)))

    def _rect(self, pair: tuple[str, str]) -> str:
        (a, b), (c, d) = (sorted(self.axes[name].pixels) for name in pair)
        return f'<rect x="{a - 1:.1f}" y="{c - 1:.1f}" width="{b - a + 2:.1f}" height="{d - c + 2:.1f}"/>'

    def _plots(self) -> Iterator[str]:
        order = sorted(range(len(self.traces)), key=lambda at: self.traces[at].get("zorder") or 0)
        for number in order:
            trace = self.traces[number]
            pair = axes_of(trace)
            x, y = (self.axes[name] for name in pair)
            is_cut = trace["type"] != "bar" and trace.get("cliponaxis") is not False
            yield f'<g clip-path="url(#c{self._pairs().index(pair)})">' if is_cut else "<g>"
            if trace["type"] == "bar":
                yield from self.marks.bars(trace, self.bars[number], x, y, number)
            elif trace["type"] == "scatter":
                yield from self.marks.points(trace, x, y, number)
            else:
                yield from self.marks.heat_map(trace, x, y)
            yield "</g>"

    def _grids(self) -> Iterator[str]:
        for pair in self._pairs():
            for name, other in (pair, pair[::-1]):
                yield from self._grid(self.axes[name], self.axes[other])
        for name in {name: None for pair in self._pairs() for name in pair}:
            yield from self._labels(self.axes[name])

    def _grid(self, axis: Axis, other: Axis) -> Iterator[str]:
        settings, (low, high) = axis.settings, sorted(other.pixels)
        if settings.get("visible") is False or settings.get("showgrid") is False:
            return
        path = "".join(
            f"M{axis.pixel(at):.1f} {low:.1f}V{high:.1f}"
            if axis.is_x
            else f"M{low:.1f} {axis.pixel(at):.1f}H{high:.1f}"
            for at, _ in axis.ticks()
        )
        yield f'<path d="{path}" stroke="{settings.get("gridcolor") or theme.GRID}"/>'

    def _labels(self, axis: Axis) -> Iterator[str]:
        settings = axis.settings
        if settings.get("visible") is False:
            return
        other = self.axes.get(str(settings.get("anchor"))) or next(
            self.axes[pair[axis.is_x]] for pair in self._pairs() if axis.name in pair
        )
        is_far = settings.get("side") in {"top", "right"}
        edge = (max if axis.is_x is not is_far else min)(other.pixels)
        out = 5 if axis.is_x is not is_far else -5
        is_named = settings.get("showticklabels") is not False
        for at, text in axis.ticks() if is_named else ():
            if axis.is_x:
                yield text_svg(
                    text, axis.pixel(at), edge + out, size=axis.size, anchor="middle", up=float(is_far)
                )
            else:
                yield text_svg(
                    text, edge + out, axis.pixel(at), size=axis.size, anchor="start" if is_far else "end"
                )
        middle = sum(axis.pixels) / 2
        beyond = edge + (self._room(axis) - DEFAULT * 0.75) * (1 if out > 0 else -1)
        if axis.title and axis.is_x:
            yield text_svg(axis.title, middle, beyond, size=DEFAULT, anchor="middle")
        elif axis.title:
            yield text_svg(axis.title, beyond, middle, size=DEFAULT, anchor="middle", angle=-90)

    def _shapes(self, layer: str) -> Iterator[str]:
        for shape in self.layout.get("shapes") or ():
            if (shape.get("layer") or "above") != layer or shape.get("visible") is False:
                continue
            (x0, y0), (x1, y1) = (
                (self._where("x", shape, f"x{end}"), self._where("y", shape, f"y{end}")) for end in (0, 1)
            )
            line = shape.get("line") or {}
            wide = 2 if line.get("width") is None else line["width"]
            dash = DASHES.get(line.get("dash") or "", "")
            style = (
                f'stroke="{line.get("color") or self.ink}" stroke-width="{wide:g}"'
                + f' stroke-dasharray="{dash}"' * bool(dash)
            )
            if shape["type"] == "line":
                yield f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" {style}/>'
            else:
                yield (
                    f'<rect x="{min(x0, x1):.1f}" y="{min(y0, y1):.1f}" width="{abs(x1 - x0):.1f}" '
                    f'height="{abs(y1 - y0):.1f}" fill="{shape.get("fillcolor") or "none"}" {style if wide else ""}/>'
                )

    def _where(self, letter: str, item: Mapping[str, Any], name: str) -> float:
        """Return the pixel of a coordinate of a shape or an annotation."""
        left, top, right, bottom = self.box
        ref, value = str(item.get(f"{letter}ref") or letter), item[name]
        first, last = (left, right) if letter == "x" else (bottom, top)
        if ref == "paper":
            return float(first + value * (last - first))
        axis = self.axes.get(ref.removesuffix(" domain"))
        if axis is None:
            return float(first + value * (last - first))
        if ref.endswith(" domain"):
            return float(axis.pixels[0] + value * (axis.pixels[1] - axis.pixels[0]))
        # Plotly reads positions of annotations on a logarithmic axis as exponents, and those of shapes as values.
        return axis.pixel(value) if axis.is_log and "text" in item else axis.at(value)

    def _annotations(self) -> Iterator[str]:
        for note in self.layout.get("annotations") or ():
            if not note.get("text") or note.get("visible") is False:
                continue
            x, y = self._where("x", note, "x"), self._where("y", note, "y")
            has_arrow = note.get("showarrow", True)
            if has_arrow:
                to_x, to_y = x + (note.get("ax") or 0), y + (-30 if note.get("ay") is None else note["ay"])
                ink = note.get("arrowcolor") or self.ink
                yield f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{ink}"/>'
                x, y = to_x, to_y
            font = note.get("font") or {}
            across, down = note.get("xanchor") or "auto", note.get("yanchor") or "auto"
            anchor = {"left": "start", "right": "end"}.get(across, "middle")
            up = {"top": 0.0, "bottom": 1.0}.get(down, 1.0 if has_arrow else 0.5)
            moved, risen = note.get("xshift") or 0, note.get("yshift") or 0
            yield text_svg(
                note["text"], x + moved, y - risen, size=font.get("size") or DEFAULT, colour=font.get("color") or "",
                anchor=anchor, up=up, angle=note.get("textangle") or 0,
            )  # fmt: skip

    def _legends(self) -> list[Legend]:
        """Return the legends, with their entries in rows, including those that are beside the live figure."""
        members: dict[str, list[int]] = {}
        for number, trace in enumerate(self.traces):
            if trace.get("showlegend") is not False and trace.get("name"):
                members.setdefault(trace.get("legend") or "legend", []).append(number)
        found = []
        for name, numbers in members.items():
            settings = self.layout.get(name) or {}
            title = str((settings.get("title") or {}).get("text") or "").strip()
            start = left = text_size(title, KEY)[0] + 12 if title else 4.0
            rows: list[list[tuple[float, int]]] = [[]]
            for number in sorted(numbers, key=lambda at: self.traces[at].get("legendrank") or 1000):
                wide = text_size(self.traces[number]["name"], KEY)[0] + 36
                if left + wide > self.width - 8 and rows[-1]:
                    rows, left = [*rows, []], start
                rows[-1].append((left, number))
                left += wide
            if len(numbers) > 1 or self.traces[numbers[0]].get("showlegend"):
                found.append(Legend(title, rows, is_below=settings.get("y") == 0))
        return found

    def _room_above(self) -> int:
        """Return the pixels that the legends above need in addition to the margin of the figure."""
        rows = sum(len(each.rows) for each in self.legends if not each.is_below)
        heads = [
            text_size(note["text"], KEY)[1] + 8
            for note in self.layout.get("annotations") or ()
            if note.get("yref") == "paper" and note.get("yanchor") == "bottom" and note["y"] >= 0.99
        ]
        free = (self.layout.get("margin") or {}).get("t", 100) - max(heads, default=4)
        return round(max(0, rows * ROW + 4 - free)) if rows else 0

    def _keys(self) -> Iterator[str]:
        for legend in self.legends:
            first = self.height - ROW * len(legend.rows) + 6 if legend.is_below else 9.0
            if legend.title:
                yield text_svg(legend.title, 4, first, size=KEY)
            for at, row in enumerate(legend.rows):
                for left, number in row:
                    yield self._key(self.traces[number], number, left, first + ROW * at)
                    yield text_svg(self.traces[number]["name"], left + 22, first + ROW * at, size=KEY)

        yield from self._scales()

    def _scales(self) -> Iterator[str]:
        """Yield the colour scale of markers, at the right end of the legend's row."""
        for trace in self.traces:
            marker = trace.get("marker") or {}
            bar = marker.get("colorbar")
            if not bar:
                continue
            low, *_, high = bar["ticktext"]
            x, end = self.width - 12 - text_size(high, KEY)[0], self.width - 8
            stops = "".join(
                f'<stop offset="{at:g}" stop-color="{colour}"/>' for at, colour in marker["colorscale"]
            )
            yield f'<linearGradient id="scale">{stops}</linearGradient>'
            yield f'<rect x="{x - 64:.1f}" y="5" width="60" height="9" fill="url(#scale)"/>'
            yield text_svg(high, end, 9, size=KEY, anchor="end")
            yield text_svg(f"{bar['title']['text']}: {low}", x - 68, 9, size=KEY, anchor="end")

    def _key(self, trace: Mapping[str, Any], number: int, x: float, y: float) -> str:
        colour, marker = self.marks.colour(trace, number), trace.get("marker") or {}
        if trace["type"] == "bar":
            fill = self.marks.fill(colour, marker.get("pattern") or {}, 0)
            return f'<rect x="{x + 2:.1f}" y="{y - 5:.1f}" width="14" height="10" fill="{fill}"/>'
        one = {
            **trace,
            "x": [x, x + 18],
            "y": [y, y],
            "text": None,
            "fill": None,
            "error_x": None,
            "error_y": None,
        }
        if "lines" not in str(trace.get("mode", "lines")):
            one |= {"x": [x + 9], "y": [y], "marker": {**marker, "size": 9}}
        straight = Axis("x", {"type": "linear", "range": [0, 1]}, [], is_padded=False)
        return "".join(self.marks.points(one, straight, straight, number))
