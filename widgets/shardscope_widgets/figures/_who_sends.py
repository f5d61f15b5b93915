"""Message diagrams: each algorithm drawn round by round for eight workers, as an SVG without a script.

These rounds are only for illustration. The number and times of rounds for W workers come from the formulas in
`shardscope.analytic.communication`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import cos, pi, sin
from typing import NamedTuple

from shardscope.analytic.communication import ALGORITHMS
from shardscope_widgets.words import listed, plural, safe

WORKERS = 8
PER_NODE = 4
_SIZE, _RADIUS, _DOT = 300, 104, 15
_RING = [(rank, (rank + 1) % WORKERS) for rank in range(WORKERS)]

Arrow = tuple[int, int]


class Round(NamedTuple):
    """One round: messages that are sent simultaneously."""

    name: str
    arrows: tuple[Arrow, ...]
    part: str
    """Size of each message as text, such as ``"S/8"``."""


class Picture(NamedTuple):
    """The rounds of an algorithm among eight workers, and the node in the centre, if there is one."""

    algorithm: str
    rounds: tuple[Round, ...]
    middle: str = ""
    """Name of the central node, such as a server or switch; empty for none. Its index in arrows is `WORKERS`."""


def picture(algorithm: str) -> Picture:
    """Return the rounds of an algorithm's main operation.

    Raises:
        KeyError: The algorithm has no picture.
    """
    make, middle = _PICTURES[algorithm]
    return Picture(
        algorithm, tuple(Round(name, tuple(arrows), part) for name, arrows, part in make()), middle
    )


def has_picture(algorithm: str) -> bool:
    """Return whether the algorithm has a picture."""
    return algorithm in _PICTURES


Steps = Iterator[tuple[str, list[Arrow], str]]


def _ring() -> Steps:
    for phase in ("reduce-scatter", "all-gather"):
        for number in range(1, WORKERS):
            yield f"{phase}, {number} of {WORKERS - 1}", _RING, "S/8"


def _both_ways() -> Steps:
    for name, arrows, _ in _ring():
        yield name, arrows + [(b, a) for a, b in arrows], "S/16"


def _tree() -> Steps:
    spans = (1, 2, 4)
    climbs = [[(r, r - span) for r in range(WORKERS) if r % (2 * span) == span] for span in spans]
    for number, arrows in enumerate(climbs, 1):
        yield f"up, {number} of 3", arrows, "S"
    for number, arrows in enumerate(reversed(climbs), 1):
        yield f"down, {number} of 3", [(b, a) for a, b in arrows], "S"


def _binary(shift: int = 0) -> list[Arrow]:
    """Return the edges of a binary tree from child to parent, with ranks rotated by `shift`.

    With a suitable shift, the leaves of one tree are inner nodes of the other.
    """
    return [((child + shift) % WORKERS, ((child - 1) // 2 + shift) % WORKERS) for child in range(1, WORKERS)]


def _pipelined() -> Steps:
    up = _binary()
    yield "first segments climb", [arrow for arrow in up if arrow[0] >= 3], "S/m"
    yield "later segments follow", up, "S/m"
    yield "segments move up and down at once", up + [(b, a) for a, b in up], "S/m"
    yield "last segments come down", [(b, a) for a, b in up], "S/m"


def _two_trees() -> Steps:
    one, other = _binary(), _binary(4)
    yield "first half goes up its tree", one, "S/2m"
    yield "second half goes up the other tree", other, "S/2m"
    yield "both halves move up and down at once", [*one, *other, *((b, a) for a, b in one + other)], "S/2m"


def _partners(order: tuple[int, ...], parts: tuple[str, ...], name: str) -> Steps:
    for number, (span, part) in enumerate(zip(order, parts, strict=True), 1):
        arrows = [(rank, rank ^ span) for rank in range(WORKERS)]
        yield f"{name}, {number} of {len(order)}", arrows, part


def _halving() -> Steps:
    yield from _partners((4, 2, 1), ("S/2", "S/4", "S/8"), "recursive halving")
    yield from _partners((1, 2, 4), ("S/8", "S/4", "S/2"), "recursive doubling")


def _doubling() -> Steps:
    yield from _partners((1, 2, 4), ("S", "S", "S"), "exchange")


def _rows(size: int) -> list[Arrow]:
    return [(r, r - r % size + (r + 1) % size) for r in range(WORKERS)]


def _columns(size: int) -> list[Arrow]:
    return [(r, (r + size) % WORKERS) for r in range(WORKERS)]


def _levels(names: tuple[str, str]) -> Steps:
    for number in range(1, PER_NODE):
        yield f"reduce-scatter {names[0]}, {number} of 3", _rows(PER_NODE), "S/4"
    for phase in ("reduce-scatter", "all-gather"):
        yield f"{phase} {names[1]}", _columns(PER_NODE), "S/8"
    for number in range(1, PER_NODE):
        yield f"all-gather {names[0]}, {number} of 3", _rows(PER_NODE), "S/4"


def _star(push: str, pull: str) -> Callable[[], Steps]:
    def steps() -> Steps:
        yield push, [(rank, WORKERS) for rank in range(WORKERS)], "S"
        yield pull, [(WORKERS, rank) for rank in range(WORKERS)], "S"

    return steps


def _byteps() -> Steps:
    everyone = [(a, b) for a in range(WORKERS) for b in range(WORKERS) if a != b]
    star = [(rank, WORKERS) for rank in range(WORKERS)]
    yield "push a share to every node that sums", everyone + star, "one share"
    yield "pull the sums", everyone + [(b, a) for a, b in star], "one share"


def _light() -> Steps:
    yield (
        "in each group (at most 2w+1 = 5), workers send to the middle one",
        [(0, 2), (1, 2), (3, 2), (4, 2), (5, 6), (7, 6)],
        "S",
    )
    yield "the middle workers exchange, all to all", [(2, 6), (6, 2)], "S"
    yield "the middle workers send the result back", [(2, 0), (2, 1), (2, 3), (2, 4), (6, 5), (6, 7)], "S"


def _turns() -> Steps:
    for shift in range(1, WORKERS):
        yield (
            f"exchange {shift} of {WORKERS - 1}",
            [(r, (r + shift) % WORKERS) for r in range(WORKERS)],
            "S/8",
        )


def _hops() -> Steps:
    for number, span in enumerate((1, 2, 4), 1):
        yield (
            f"round {number} of 3: distance {span}",
            [(r, (r + span) % WORKERS) for r in range(WORKERS)],
            "S/2",
        )


def _chain() -> Steps:
    for number in range(1, WORKERS):
        yield f"segment 1 on hop {number}", [(r, r + 1) for r in range(number)], "S/m"


_PICTURES: dict[str, tuple[Callable[[], Steps], str]] = {
    "parameter-server": (_star("all push gradients", "all pull parameters"), "server"),
    "byteps": (_byteps, "CPUs"),
    "ring": (_ring, ""),
    "bidirectional-ring": (_both_ways, ""),
    "chain": (_chain, ""),
    "tree": (_tree, ""),
    "pipelined-tree": (_pipelined, ""),
    "double-binary-tree": (_two_trees, ""),
    "halving-doubling": (_halving, ""),
    "recursive-doubling": (_doubling, ""),
    "hierarchical": (lambda: _levels(("inside nodes of 4", "across nodes")), ""),
    "torus-2d": (lambda: _levels(("along rows of 4", "along columns")), ""),
    "in-network": (_star("all send to the switch, which sums", "the switch sends the sum to all"), "switch"),
    "nvls": (
        _star("the switch reads and sums one share per worker", "the switch writes the sums to all"),
        "switch",
    ),
    "optical-ring": (_light, ""),
    "pairwise": (_turns, ""),
    "bruck": (_hops, ""),
}


def round_text(shown: Picture, number: int) -> str:
    """Describe round `number` (0-based) in words, also for screen readers."""
    round_ = shown.rounds[number]
    sends = sorted({a for a, _ in round_.arrows})
    names = [f"The {shown.middle}" if rank == WORKERS else f"{rank}" for rank in sends]
    who = (
        "Every worker sends"
        if len(names) >= WORKERS
        else f"{listed(names)} send{'s' if len(names) == 1 else ''}"
    )
    place = f"{ALGORITHMS[shown.algorithm].title}, round {number + 1} of {len(shown.rounds)}"
    each = " each" if len(round_.arrows) > 1 else ""
    return f"{place}: {round_.name}. {who}: {plural(len(round_.arrows), 'message')} of {round_.part}{each}."


def who_sends_svg(shown: Picture, number: int, colour: str) -> str:
    """Return round `number` (0-based) as an SVG: workers on a circle, an arrow for each message."""
    lanes = [_arrow(a, b, colour) for a, b in shown.rounds[number].arrows]
    dots = [_dot(*_place(rank), str(rank)) for rank in range(WORKERS)]
    middle = [_dot(_SIZE / 2, _SIZE / 2, shown.middle)] if shown.middle else []
    label = safe(round_text(shown, number))
    head = (
        f'<marker id="ss-head-{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0,0.6 L8,4 L0,7.4 Z" fill="{colour}"/></marker>'
    )
    return (
        f'<svg class="ss-who" viewBox="0 0 {_SIZE} {_SIZE}" width="{_SIZE}" role="img" aria-label="{label}">'
        f"<defs>{head}</defs>{''.join(lanes)}{''.join(middle)}{''.join(dots)}</svg>"
    )


def _place(rank: int) -> tuple[float, float]:
    if rank == WORKERS:
        return _SIZE / 2, _SIZE / 2
    turn = 2 * pi * rank / WORKERS - pi / 2
    return _SIZE / 2 + _RADIUS * cos(turn), _SIZE / 2 + _RADIUS * sin(turn)


def _arrow(source: int, target: int, colour: str) -> str:
    """Return an arrow from the edge of one dot to the edge of another, curved so that both directions are visible."""
    (x0, y0), (x1, y1) = _place(source), _place(target)
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1.0)
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    bend = 0.09 * length
    from_rim, to_rim = (_DOT + 13 if rank == WORKERS else _DOT + 2 for rank in (source, target))
    start = x0 + ux * from_rim, y0 + uy * from_rim
    end = x1 - ux * to_rim, y1 - uy * to_rim
    knee = (x0 + x1) / 2 - uy * bend, (y0 + y1) / 2 + ux * bend
    path = f"M{start[0]:.1f},{start[1]:.1f} Q{knee[0]:.1f},{knee[1]:.1f} {end[0]:.1f},{end[1]:.1f}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" marker-end="url(#ss-head-{colour[1:]})"/>'


def _dot(x: float, y: float, text: str) -> str:
    is_short = len(text) <= 2
    radius, size = (_DOT, 12) if is_short else (_DOT + 11, 11)
    circle = f'<circle class="ss-dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
    return f'{circle}<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" font-size="{size}">{safe(text)}</text>'
