"""A wire to hold formulas against: ranks that really hold pieces of tensors and really pass them on, round by round.

It knows nothing of the formulas. A rank holds, for each piece, whose contributions are in it; a round moves pieces
between ranks, all at once, and is as long as the busiest rank (or link) has bytes to send or to receive. Adding what is
already there, or passing on what one does not have, is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

Piece = int


class Move(NamedTuple):
    """One rank hands a piece to another, which adds it to its own or takes it in its place."""

    source: int
    target: int
    piece: Piece
    adds: bool = False


@dataclass
class Wire:
    """W ranks, each with a tensor of `num_bytes` in `pieces` of equal size."""

    workers: int
    pieces: int
    num_bytes: int = 1
    holds: list[list[frozenset[int]]] = field(default_factory=list)
    rounds: int = 0
    critical: Fraction = Fraction(0)
    critical_by_link: Fraction = Fraction(0)
    added: Fraction = Fraction(0)
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.size = Fraction(self.num_bytes, self.pieces)
        self.holds = self.holds or [
            [frozenset({rank}) for _ in range(self.pieces)] for rank in range(self.workers)
        ]

    def step(self, moves: Iterable[Move]) -> None:
        """All moves at once; a round without any is none."""
        moves = list(moves)
        if not moves:
            return
        out, into, links, adds = Counter(), Counter(), Counter(), Counter()
        taken = [(move, self.holds[move.source][move.piece]) for move in moves]
        for move, content in taken:
            own = self.holds[move.target][move.piece]
            assert content, f"{move} passes on nothing"
            assert not (move.adds and own & content), f"{move} adds {own & content} twice"
            self.holds[move.target][move.piece] = own | content if move.adds else content
            out[move.source] += self.size
            into[move.target] += self.size
            links[move.source, move.target] += self.size
            adds[move.target] += self.size * move.adds
        self.rounds += 1
        self.critical += max(*out.values(), *into.values())
        self.critical_by_link += max(links.values())
        self.added += max(adds.values())
        self.sent.update(out)
        self.received.update(into)

    @property
    def busiest_sent(self) -> Fraction:
        return max(self.sent.values(), default=Fraction(0))

    @property
    def is_reduced_everywhere(self) -> bool:
        everyone = frozenset(range(self.workers))
        return all(content == everyone for rank in self.holds for content in rank)


def ring_rounds(
    ranks: Sequence[int], pieces: Sequence[Sequence[Piece]], *, phase: str
) -> Iterable[list[Move]]:
    """Rounds of one phase of a ring; `pieces[c]` is what chunk c is made of."""
    world = len(ranks)
    adds = phase == "reduce_scatter"
    for round_ in range(world - 1):
        behind = round_ + (1 if adds else 0)
        yield [
            Move(ranks[place], ranks[(place + 1) % world], piece, adds)
            for place in range(world)
            for piece in pieces[(place - behind) % world]
        ]


def run_ring(wire: Wire) -> Wire:
    ranks, pieces = range(wire.workers), [[c] for c in range(wire.pieces)]
    for phase in ("reduce_scatter", "all_gather"):
        for moves in ring_rounds(ranks, pieces, phase=phase):
            wire.step(moves)
    return wire


def run_both_ways(workers: int) -> Wire:
    wire = Wire(workers, 2 * workers)
    clockwise, counter = range(workers), range(workers - 1, -1, -1)
    first, second = [[c] for c in range(workers)], [[workers + c] for c in range(workers)]
    for phase in ("reduce_scatter", "all_gather"):
        both = (ring_rounds(clockwise, first, phase=phase), ring_rounds(counter, second, phase=phase))
        for one, other in zip(*both, strict=True):
            wire.step([*one, *other])
    return wire


def run_two_levels(nodes: int, per_node: int) -> tuple[Wire, Fraction]:
    """Rings inside, across, inside; also what passed between nodes in its rounds."""
    workers = nodes * per_node
    wire = Wire(workers, workers)
    inner = [[c * nodes + k for k in range(nodes)] for c in range(per_node)]
    groups = [[node * per_node + place for place in range(per_node)] for node in range(nodes)]
    for moves in zip(*(ring_rounds(group, inner, phase="reduce_scatter") for group in groups), strict=True):
        wire.step(move for part in moves for move in part)
    before = wire.critical
    for phase in ("reduce_scatter", "all_gather"):
        lanes = [
            ring_rounds(range(place, workers, per_node), [[c] for c in inner[place]], phase=phase)
            for place in range(per_node)
        ]
        for moves in zip(*lanes, strict=True):
            wire.step(move for part in moves for move in part)
    across = wire.critical - before
    for moves in zip(*(ring_rounds(group, inner, phase="all_gather") for group in groups), strict=True):
        wire.step(move for part in moves for move in part)
    return wire, across


def run_binomial(workers: int) -> Wire:
    wire, span = Wire(workers, 1), 1
    spans = []
    while span < workers:
        spans.append(span)
        wire.step(
            Move(rank, rank - span, 0, adds=True) for rank in range(workers) if rank % (2 * span) == span
        )
        span *= 2
    for span in reversed(spans):
        wire.step(Move(rank - span, rank, 0) for rank in range(workers) if rank % (2 * span) == span)
    return wire


def run_chain(workers: int, segments: int) -> Wire:
    nobody = [[frozenset() for _ in range(segments)] for _ in range(workers - 1)]
    wire = Wire(workers, segments, holds=[[frozenset({0})] * segments, *nobody])
    for round_ in range(workers - 1 + segments - 1):
        wire.step(
            Move(rank, rank + 1, round_ - rank)
            for rank in range(workers - 1)
            if 0 <= round_ - rank < segments
        )
    assert all(content == {0} for rank in wire.holds for content in rank)
    return wire


def run_recursive_doubling(workers: int) -> Wire:
    wire = Wire(workers, 1)
    power = 1 << (workers.bit_length() - 1)
    extra = workers - power
    wire.step(Move(power + rank, rank, 0, adds=True) for rank in range(extra))
    span = 1
    while span < power:
        wire.step(Move(rank, rank ^ span, 0, adds=True) for rank in range(power))
        span *= 2
    wire.step(Move(rank, power + rank, 0) for rank in range(extra))
    return wire


def run_halving_doubling(workers: int) -> Wire:
    power = 1 << (workers.bit_length() - 1)
    wire, extra = Wire(workers, power), workers - power
    wire.step(Move(power + rank, rank, piece, adds=True) for rank in range(extra) for piece in range(power))
    span = power // 2
    spans = []
    while span:
        spans.append(span)
        wire.step(
            Move(rank, rank ^ span, piece, adds=True)
            for rank in range(power)
            for piece in range(power)
            if piece // span == (rank ^ span) // span  # the half that the partner keeps
        )
        span //= 2
    for span in reversed(spans):
        wire.step(
            Move(rank, rank ^ span, piece)
            for rank in range(power)
            for piece in range(power)
            if piece // span == rank // span
        )
    wire.step(Move(rank, power + rank, piece) for rank in range(extra) for piece in range(power))
    return wire


def run_server(workers: int, servers: int, *, dedicated: bool) -> Wire:
    """All push, then all pull; the servers are the first ranks, or come behind the workers."""
    everyone = workers + servers if dedicated else workers
    first = workers if dedicated else 0
    wire = Wire(everyone, servers)
    for rank in range(workers, everyone):
        wire.holds[rank] = [frozenset() for _ in range(servers)]
    pairs = [
        (rank, first + piece, piece)
        for rank in range(workers)
        for piece in range(servers)
        if rank != first + piece
    ]
    wire.step(Move(rank, server, piece, adds=True) for rank, server, piece in pairs)
    wire.step(Move(server, rank, piece) for rank, server, piece in pairs)
    assert all(len(wire.holds[rank][piece]) == workers for rank in range(workers) for piece in range(servers))
    return wire


class Exchange(NamedTuple):
    """What an all-to-all took: rounds, and bytes of the busiest rank."""

    rounds: int
    sent: Fraction


def run_bruck(workers: int) -> Exchange:
    """Blocks (source, target) hop 1, 2, 4, ... ranks towards their targets."""
    held = [{(rank, target) for target in range(workers)} for rank in range(workers)]
    span, rounds, sent = 1, 0, Counter()
    while span < workers:
        leaving = [{b for b in held[rank] if (b[1] - rank) % workers & span} for rank in range(workers)]
        for rank, blocks in enumerate(leaving):
            held[rank] -= blocks
            sent[rank] += Fraction(len(blocks), workers)
        for rank, blocks in enumerate(leaving):
            held[(rank + span) % workers] |= blocks
        span, rounds = 2 * span, rounds + 1
    assert all(blocks == {(source, rank) for source in range(workers)} for rank, blocks in enumerate(held))
    return Exchange(rounds, max(sent.values(), default=Fraction(0)))


class Light(NamedTuple):
    """What an all-reduce over light took."""

    steps: int
    last_group: int
    """Ranks that were left when they exchanged all to all, or in the last group."""
    wavelengths: int
    """The most that passed any stretch of fibre in one direction at once."""
    everyone_has_all: bool


def run_light(workers: int, wavelengths: int) -> Light:
    """WRHT on a ring of fibres, one each way: groups of neighbours send to their middle, and the middles again."""
    holds = [{rank} for rank in range(workers)]
    level, steps, most, stack = list(range(workers)), 0, 0, []
    last = 1
    while len(level) > 1:
        last = len(level)
        if len(level) <= 2 * wavelengths + 1:
            load = _fibre_load([(a, b) for a in level for b in level if a != b], workers)
            if load <= wavelengths:
                union = set().union(*(holds[rank] for rank in level))
                for rank in level:
                    holds[rank] = set(union)
                steps, most = steps + 1, max(most, load)
                break
        size = 2 * wavelengths + 1
        groups = [level[start : start + size] for start in range(0, len(level), size)]
        paths = [(rank, group[len(group) // 2]) for group in groups for rank in group]
        paths = [(a, b) for a, b in paths if a != b]
        for source, target in paths:
            holds[target] |= holds[source]
        steps, most = steps + 1, max(most, _straight_load(paths))
        stack.append(paths)
        level = [group[len(group) // 2] for group in groups]
    for paths in reversed(stack):
        for member, middle in paths:
            holds[member] = set(holds[middle])
        steps, most = steps + 1, max(most, _straight_load([(b, a) for a, b in paths]))
    return Light(steps, last, most, all(len(have) == workers for have in holds))


def _straight_load(paths: Sequence[tuple[int, int]]) -> int:
    """Paths within groups do not pass the ring's seam."""
    load = Counter((position, a < b) for a, b in paths for position in range(min(a, b), max(a, b)))
    return max(load.values(), default=0)


def _fibre_load(pairs: Sequence[tuple[int, int]], workers: int) -> int:
    """Each pair takes the way around with fewer of those who talk on it; halfway ones take both ways in turn."""
    members = sorted({rank for pair in pairs for rank in pair})
    place = {rank: index for index, rank in enumerate(members)}
    count, load = len(members), Counter()
    for a, b in pairs:
        ahead = (place[b] - place[a]) % count
        forward = ahead * 2 < count or (ahead * 2 == count and place[a] % 2 == 0)
        hops = ahead if forward else count - ahead
        for hop in range(hops):
            load[(place[a] + (hop if forward else -hop - 1)) % count, forward] += 1
    return max(load.values(), default=0)
