"""An animated SVG of one step, drawn from the same events as the player.

The picture is animated by SMIL, so it also moves where scripts do not run, as in a README. Its own background and the
media query for dark themes make it readable on any page. As in the player, time passes more slowly while messages
travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from math import cos, pi, sin
from pathlib import Path

from shardscope.errors import SpecError
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.runlog.step_events import StepEvent, StepEvents
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._rank_mesh import grid_places
from shardscope_widgets.step_player._cells import GRADIENTS, MICRO_BATCHES, Cell, cells_of
from shardscope_widgets.words import bytes_text, duration_text

MOST_RANKS = 8
"""Maximum number of ranks in a picture."""
_WIDTH, _STAGE, _ROW, _LEFT, _AREA = 760, 306, 24, 62, 58
_CARD_W, _CARD_H = 150, 62
_TRAVELLING = 0.6
"""Minimum share of the playing time in which messages travel."""
_CHUNKS = ("#2a86d1", "#e08a3c", "#11997a", "#b866a6", "#c49a0c", "#5f6fd6", "#3aa5b5", "#a35a3a")
_STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#1f2328}
.ground{fill:#fff;stroke:#d6dae0}.card{fill:#fff;stroke:#aab1bb;stroke-width:1.4}.link{fill:none;stroke:#c4c9d0;stroke-width:1.5}
.row,.track{fill:#8b8f9922}.faint{fill:#626971}.bold{font-weight:600}.title{font-size:15px;font-weight:600}.on{fill:#fff;font-weight:700}
@media(prefers-color-scheme:dark){text{fill:#e6e8eb}.ground{fill:#1b1f24;stroke:#3a4048}.card{fill:#1b1f24;stroke:#69707a}
.link{stroke:#4a5058}.faint{fill:#a3a9b2}.on{fill:#fff}}
"""
Clock = Callable[[float], float]
"""Function from a time of the step, in seconds, to a fraction of the playing time."""
Point = tuple[float, float]


def write_picture(step: StepEvents, path: str | Path, *, seconds: float) -> str:
    """Write an animated SVG of a step, and return its path.

    Raises:
        SpecError: The step has more than `MOST_RANKS` ranks.
    """
    Path(path).write_text(picture_svg(step, seconds=seconds), encoding="utf-8")
    return str(path)


def picture_svg(step: StepEvents, *, seconds: float) -> str:
    """Return an animated SVG of a step.

    Raises:
        SpecError: The step has more than `MOST_RANKS` ranks.
    """
    if step.world_size > MOST_RANKS:
        raise SpecError(f"a picture shows at most {MOST_RANKS} ranks, but this step has {step.world_size}")
    return "\n".join(_Picture(step, seconds).lines()) + "\n"


def playing_clock(step: StepEvents) -> Clock:
    """Return the clock of the picture, which runs more slowly while messages travel."""
    edges = sorted({0.0, step.step_time_s, *(t for m in step.messages for t in (m.start_s, m.end_s))})
    pieces = [(a, b, any(m.start_s < b and m.end_s > a for m in step.messages)) for a, b in pairwise(edges)]
    moving = sum(b - a for a, b, has in pieces if has)
    share = moving / step.step_time_s
    slower = _TRAVELLING / (1 - _TRAVELLING) * (1 - share) / share if 0 < share < _TRAVELLING else 1.0
    lengths = [(b - a) * (slower if has else 1.0) for a, b, has in pieces]

    def clock(time: float) -> float:
        done = 0.0
        for (a, b, _), length in zip(pieces, lengths, strict=True):
            if time >= b:
                done += length
            elif time > a:
                done += length * (time - a) / (b - a)
        return min(1.0, done / sum(lengths))

    return clock


class _Picture:
    def __init__(self, step: StepEvents, seconds: float) -> None:
        self.step, self.seconds, self.clock = step, seconds, playing_clock(step)
        self.height = _STAGE + 40 + step.world_size * _ROW + _AREA + 34
        self.centres = self._centres()
        self.cells = cells_of(step)

    def lines(self) -> Iterator[str]:
        step = self.step
        title = f"One training step on {step.world_size} ranks, {step.origin}: {escape(step.label)}"
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {self.height}" width="{_WIDTH}" '
            f'role="img" aria-label="{title}"><title>{title}</title><style>{_STYLE}</style>'
        )
        yield f'<rect class="ground" x=".5" y=".5" width="{_WIDTH - 1}" height="{self.height - 1}" rx="10"/>'
        yield f'<text class="title" x="18" y="28">{escape(step.label)}</text>'
        total = f"{step.origin}, {duration_text(step.step_time_s)}, {bytes_text(sum(step.sent_bytes))} sent"
        yield f'<text class="faint" x="18" y="46">{total}</text>'
        yield from self._links()
        for rank in range(step.world_size):
            yield from self._card(rank)
        for message in step.messages:
            if message.num_bytes > 64:
                yield from self._packet(message)
        yield from self._timeline()
        yield from self._legend()
        yield "</svg>"

    def _centres(self) -> list[Point]:
        n, shape, hubs = self.step.world_size, self.step.arrangement.shape, self.step.arrangement.hubs
        middle = (_WIDTH / 2, _STAGE / 2 + 30)
        if shape == "row":
            return [(_WIDTH * (k + 0.5) / n, middle[1]) for k in range(n)]
        if shape == "grid":
            return self._grid(middle[1])
        if shape == "tree":
            depth = n.bit_length() - 1
            levels = [(rank + 1).bit_length() - 1 for rank in range(n)]
            return [
                (_WIDTH * (rank + 1 - 2**level + 0.5) / 2**level, 76 + (_STAGE - 76) * level / max(depth, 1))
                for rank, level in enumerate(levels)
            ]
        outer = [rank for rank in range(n) if rank not in hubs]
        places = {rank: (middle[0] + 80 * (2 * k - len(hubs) + 1), middle[1]) for k, rank in enumerate(hubs)}
        for k, rank in enumerate(outer):
            angle = -pi / 2 + 2 * pi * k / len(outer)
            places[rank] = (middle[0] + 250 * cos(angle), middle[1] + 100 * sin(angle))
        return [places[rank] for rank in range(n)]

    def _grid(self, middle: float) -> list[Point]:
        """Return the centres of the ranks of a mesh, in columns and rows."""
        _, rows, places = grid_places(self.step.arrangement.axes)
        across, down = _WIDTH / (max(x for x, _ in places) + 1), (_STAGE - 76) / rows
        return [(across * (x + 0.5), middle + down * (y - (rows - 1) / 2)) for x, y in places]

    def _curve(self, source: int, target: int) -> str:
        """Return the path of a message, from card to card; opposite directions use separate lanes."""
        (x0, y0), (x1, y1) = self.centres[source], self.centres[target]
        dx, dy = x1 - x0, y1 - y0
        length = (dx * dx + dy * dy) ** 0.5
        edge = min(0.3, 0.42 * _CARD_W / length)
        bend = 26.0 if self.step.arrangement.shape == "ring" else 14.0
        cx, cy = x0 + dx / 2 + dy / length * bend, y0 + dy / 2 - dx / length * bend
        a, b = (x0 + dx * edge, y0 + dy * edge), (x1 - dx * edge, y1 - dy * edge)
        return f"M{a[0]:.0f} {a[1]:.0f}Q{cx:.0f} {cy:.0f} {b[0]:.0f} {b[1]:.0f}"

    def _links(self) -> Iterator[str]:
        pairs = {(m.rank, m.peer) for m in self.step.messages if m.peer is not None and m.num_bytes > 64}
        for source, target in sorted(pairs):
            yield f'<path class="link" d="{self._curve(source, target)}"/>'

    def _animate(self, attribute: str, keys: Sequence[tuple[float, object]], mode: str = "discrete") -> str:
        """Return an SVG animation of an attribute; `keys` are pairs of a fraction of the playing time and a value."""
        times = ";".join(f"{min(1.0, key):.4f}" for key, _ in keys)
        values = ";".join(str(value) for _, value in keys)
        return (
            f'<animate attributeName="{attribute}" calcMode="{mode}" dur="{self.seconds:g}s" '
            f'repeatCount="indefinite" keyTimes="{times}" values="{values}"/>'
        )

    def _card(self, rank: int) -> Iterator[str]:
        x, y = self.centres[rank][0] - _CARD_W / 2, self.centres[rank][1] - _CARD_H / 2
        busy = [e for e in self.step.events if e.rank == rank and e.peer is None and e.end_s > e.start_s]
        yield f'<rect class="card" x="{x:.0f}" y="{y:.0f}" width="{_CARD_W}" height="{_CARD_H}" rx="8"/>'
        yield f'<text class="bold" x="{x + 9:.0f}" y="{y + 17:.0f}">rank {rank}</text>'
        for name in dict.fromkeys(_word(e) for e in busy):
            yield self._activity([e for e in busy if _word(e) == name], name, x + _CARD_W - 9, y + 17)
        strips = [
            [*own]
            for _, own in groupby((c for c in self.cells if c.rank == rank), key=lambda cell: cell.what)
        ]
        for place, cells in enumerate(strips):
            top, height = (y + 24, 32 if len(strips) == 1 else 20) if place == 0 else (y + 47, 9)
            each = (_CARD_W - 15) / len(cells)
            for k, cell in enumerate(cells):
                yield from self._cell(cell, x + 9 + k * each, top, each - 3, height)

    def _activity(self, events: Sequence[StepEvent], name: str, x: float, y: float) -> str:
        keys: list[tuple[float, object]] = [(0.0, 0)]
        for event in events:
            keys += [(self.clock(event.start_s), 1), (self.clock(event.end_s), 0)]
        return (
            f'<text text-anchor="end" class="faint" x="{x:.0f}" y="{y:.0f}" opacity="0">{name}'
            f"{self._animate('opacity', _increasing(keys))}</text>"
        )

    def _cell(self, cell: Cell, x: float, y: float, width: float, height: float) -> Iterator[str]:
        """Yield a cell that fills from below."""
        colour = theme.MEMORY_LOOKS["parameters"].colour
        if cell.what == GRADIENTS:
            colour = _CHUNKS[cell.number % len(_CHUNKS)]
        elif cell.what == MICRO_BATCHES:
            colour = theme.SPAN_LOOKS["backward"].colour
        levels = _increasing([(self.clock(at), height * level) for at, level in cell.keys])
        heights = _closed([(at, round(float(str(level)), 1)) for at, level in levels])
        tops = [(at, round(y + height - float(str(level)), 1)) for at, level in heights]
        box = f'x="{x:.1f}" width="{width:.1f}" rx="2"'
        yield f'<rect class="track" {box} y="{y:.0f}" height="{height}"/>'
        yield (
            f'<rect {box} y="{tops[0][1]}" height="{heights[0][1]}" fill="{colour}">'
            f"{self._animate('y', tops, 'linear')}{self._animate('height', heights, 'linear')}</rect>"
        )

    def _packet(self, message: StepEvent) -> Iterator[str]:
        assert message.peer is not None
        start, end = (
            self.clock(message.start_s),
            max(self.clock(message.end_s), self.clock(message.start_s) + 0.002),
        )
        number = "".join(c for c in message.item.split(" of the ")[0] if c.isdigit())
        colour = _CHUNKS[int(number) % len(_CHUNKS)] if number else "#e06c2c"
        times = f"0;{start:.4f};{min(end, 1):.4f};1"
        seen = self._animate("opacity", _increasing([(0.0, 0), (start, 1), (end, 0)]))
        label = f'<text class="on" text-anchor="middle" y="4">{number}</text>' if number else ""
        yield (
            f'<g opacity="0"><circle r="11" fill="{colour}"/>{label}{seen}<animateMotion dur="{self.seconds:g}s" '
            f'repeatCount="indefinite" calcMode="linear" keyTimes="{times}" keyPoints="0;0;1;1" '
            f'path="{self._curve(message.rank, message.peer)}"/></g>'
        )

    def _legend(self) -> Iterator[str]:
        x, y = float(_LEFT), self.height - 10
        held = [k for i, k in enumerate(MEMORY_KINDS) if any(p.held[i] for p in self.step.memory)]
        for kind in held:
            colour = theme.MEMORY_LOOKS[kind].colour
            yield f'<rect x="{x:.0f}" y="{y - 9}" width="16" height="9" rx="2" fill="{colour}"/>'
            yield f'<text class="faint" x="{x + 21:.0f}" y="{y}">{kind}</text>'
            x += 36 + 6.6 * len(kind)

    def _memory(self, top: float, scale: float) -> Iterator[str]:
        """Yield the memory of the rank with the highest peak as a stacked area."""
        peaks = self.step.peak_bytes
        if not peaks:
            return
        rank, end = peaks.index(max(peaks)), self.step.step_time_s
        points = [p for p in self.step.memory if p.rank == rank]
        spans = [*((p, later.at_s) for p, later in pairwise(points)), (points[-1], end)]
        yield f'<text text-anchor="end" x="{_LEFT - 8}" y="{top + 14}">memory</text>'
        yield f'<text class="faint" text-anchor="end" x="{_LEFT - 8}" y="{top + 29}">{bytes_text(max(peaks))}</text>'
        for place, kind in reversed([*enumerate(MEMORY_KINDS)]):
            if any(p.held[place] for p in points):
                path = f"M{_LEFT} {top + _AREA}" + "".join(
                    f"V{top + _AREA * (1 - sum(p.held[: place + 1]) / max(peaks)):.1f}H{_LEFT + until * scale:.1f}"
                    for p, until in spans
                )
                yield f'<path d="{path}V{top + _AREA}Z" fill="{theme.MEMORY_LOOKS[kind].colour}"/>'

    def _timeline(self) -> Iterator[str]:
        top, room = _STAGE + 34, _WIDTH - _LEFT - 18
        scale = room / self.step.step_time_s
        for rank in range(self.step.world_size):
            y = top + rank * _ROW
            yield f'<rect class="row" x="{_LEFT}" y="{y}" width="{room}" height="{_ROW - 3}"/>'
            yield f'<text text-anchor="end" x="{_LEFT - 8}" y="{y + 16}">rank {rank}</text>'
        for e in self.step.events:
            if e.peer is None and e.end_s > e.start_s:
                low = e.lane == "communication"
                yield (
                    f'<rect x="{_LEFT + e.start_s * scale:.1f}" y="{top + e.rank * _ROW + (15 if low else 1)}" '
                    f'width="{max((e.end_s - e.start_s) * scale, 0.8):.1f}" height="{7 if low else 13}" '
                    f'fill="{theme.span_look(e.kind).colour}"/>'
                )
        yield from self._memory(top + self.step.world_size * _ROW + 4, scale)
        bottom = top + self.step.world_size * _ROW + _AREA + 7
        keys = sorted(
            {0.0, self.step.step_time_s, *(t for m in self.step.messages for t in (m.start_s, m.end_s))}
        )
        path = _increasing([(self.clock(t), round(_LEFT + t * scale, 1)) for t in keys])
        yield (
            f'<rect y="{top}" width="2" height="{bottom - top - 3}" x="{_LEFT}" fill="#d1242f">'
            f"{self._animate('x', _closed(path), 'linear')}</rect>"
        )


def _word(event: StepEvent) -> str:
    return "exchanges" if event.lane == "communication" else event.kind.split(" for ")[0].replace("_", " ")


def _increasing(keys: Sequence[tuple[float, object]]) -> list[tuple[float, object]]:
    """Return keys with strictly increasing times from 0; of several keys at the same time, only the last is kept."""
    kept: dict[float, object] = {}
    for at, value in sorted(keys, key=lambda key: key[0]):
        kept[round(at, 4)] = value
    return list(kept.items())


def _closed(keys: list[tuple[float, object]]) -> list[tuple[float, object]]:
    """Return keys whose last time is 1, as linear animations require."""
    return [*keys[:-1], (1.0, keys[-1][1])] if keys[-1][0] > 0.999 else [*keys, (1.0, keys[-1][1])]
