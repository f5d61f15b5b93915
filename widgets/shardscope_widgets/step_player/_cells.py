"""What each rank holds during a step, as cells that fill: chunks of gradients and parameters, or micro-batches.

A chunk of the gradients is full when it is the sum over all ranks: with W ranks, each rank's own gradient fills 1/W of
its cell during the backward pass, and an arriving partial sum adds the ranks that it contains. A rank that has sent a
partial sum on no longer needs it, so its cell empties. A chunk of the parameters is full where it is up to date. A
micro-batch is half full after its forward pass. All fill levels are computed from the messages and spans of
`StepEvents`, so predicted and measured steps are drawn by the same rules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from shardscope.runlog.axes import axis_groups, axis_of
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.runlog.step_events import StepEvent, StepEvents

GRADIENTS, PARAMETERS, MICRO_BATCHES = "gradients", "parameters", "micro-batches"
_DATA = "data"
"""The axis of a mesh along which ranks sum gradients."""
_PASSES = {"forward": 0.5, "backward": 0.5, "backward for inputs": 0.25, "backward for weights": 0.25}
"""Fraction of a micro-batch's cell that each pass fills."""
_CHUNK, _PASS = re.compile(r"chunk (\d+)"), re.compile(r"micro-batch (\d+)(?: on stage (\d+))?")
_SOONEST_S = 1e-9
_SAME_TIME_S = 1e-6
MOST_CELLS = 8
"""Maximum number of cells of one kind on a rank; if there are more, one cell shows their mean."""
Keys = list[tuple[float, float]]
"""Pairs of a time in seconds and a fill level from 0 to 1 of a cell or a part of it; linear in between."""


class Cell(NamedTuple):
    """One cell of a rank."""

    rank: int
    what: str
    """``gradients``, ``parameters`` or ``micro-batches``."""
    number: int
    """Number of the chunk or micro-batch."""
    parts: int
    """Number of separately exchanged parts, such as one for each layer; the cell shows their mean."""
    keys: Keys


def cells_of(step: StepEvents) -> list[Cell]:
    """Return the cells of all ranks, by rank, contents and number.

    On a mesh, gradients are summed and parameters gathered over each group of ranks along the data axis.
    """
    passes = [e for e in step.events if e.peer is None and _PASS.match(e.item) and e.kind in _PASSES]
    if passes and any("micro-batch" in m.item for m in step.messages):
        return _few(sorted(_micro_batches(passes)))
    shape = dict(step.arrangement.axes)
    groups = axis_groups(shape, _DATA) if _DATA in shape else [[*range(step.world_size)]]
    found = (
        cell._replace(rank=group[cell.rank]) for group in groups for cell in _exchanged(_of(step, group))
    )
    return _few(sorted(found))


def num_summed(step: StepEvents) -> int:
    """Return the number of ranks whose gradients fill a cell: all, or on a mesh those of a group on the data axis."""
    return dict(step.arrangement.axes).get(_DATA, step.world_size)


def _of(step: StepEvents, group: Sequence[int]) -> StepEvents:
    """Return what the ranks of a group do and send to each other, with the ranks numbered within the group."""
    place = {rank: k for k, rank in enumerate(group)}
    events = (
        e._replace(rank=place[e.rank], peer=None if e.peer is None else place[e.peer])
        for e in step.events
        if e.rank in place and (e.peer is None or e.peer in place) and axis_of(e.kind) in {None, _DATA}
    )
    memory = (point._replace(rank=place[point.rank]) for point in step.memory if point.rank in place)
    return replace(step, world_size=len(group), events=tuple(events), memory=tuple(memory))


def _exchanged(step: StepEvents) -> Iterator[Cell]:
    """Yield the cells of ranks that sum their gradients together."""
    for what in (GRADIENTS, PARAMETERS):
        carried = [m for m in step.messages if m.item.endswith(what)]
        is_summed = what == GRADIENTS or any(m.phase.startswith("reduce-scatter") for m in carried)
        is_mixed = {m.rank for m in carried} == {*range(step.world_size)} and not any(
            _CHUNK.match(m.item) for m in carried
        )
        if is_summed or is_mixed:
            yield from _Sums(step, what, carried).cells()
        elif carried:
            yield from _copies(step, carried)


def _few(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells; if a rank has more than `MOST_CELLS` of one kind, replace these by one cell with their mean."""
    fewer: list[Cell] = []
    for (rank, what), group in groupby(cells, key=lambda cell: cell[:2]):
        own = [*group]
        if len(own) > MOST_CELLS:
            own = [Cell(rank, what, 0, sum(cell.parts for cell in own), _mean([cell.keys for cell in own]))]
        fewer += own
    return fewer


def _micro_batches(passes: Iterable[StepEvent]) -> Iterator[Cell]:
    parts: dict[tuple[int, int], dict[str, Keys]] = defaultdict(dict)
    for e in passes:
        found = _PASS.match(e.item)
        assert found
        keys = parts[e.rank, int(found[1])].setdefault(found[2] or "", [(0.0, 0.0)])
        keys += [(e.start_s, keys[-1][1]), (e.end_s, keys[-1][1] + _PASSES[e.kind])]
    for (rank, index), own in parts.items():
        yield Cell(rank, MICRO_BATCHES, index, len(own), _mean([*own.values()]))


def _copies(step: StepEvents, carried: Sequence[StepEvent]) -> Iterator[Cell]:
    """Yield cells of parameters: the first rank to send a chunk owns it; other ranks hold copies."""
    owners: dict[int, int] = {}
    for message in carried:
        owners.setdefault(_chunk(message), message.rank)
    for rank in range(step.world_size):
        arriving = [m for m in carried if m.peer == rank]
        freed = _freed(step, rank)
        for chunk, owner in owners.items():
            keys = [(0.0, float(rank == owner))]
            own = [m for m in arriving if _chunk(m) == chunk]
            for message in own if rank != owner else ():
                keys += [(message.start_s, 0.0), (message.end_s, 1.0)]
            if len(keys) > 1 and freed is not None:
                keys += [(freed, 1.0), (freed + _SOONEST_S, 0.0)]
            yield Cell(rank, PARAMETERS, chunk, len(own) or 1, keys)


def _freed(step: StepEvents, rank: int) -> float | None:
    """Return when a rank frees the parameters that it gathered last; None if it keeps them."""
    place = MEMORY_KINDS.index("gathered")
    held = [(p.at_s, p.held[place]) for p in step.memory if p.rank == rank]
    last = max((at for at, size in held if size), default=None)
    return next((at for at, size in held if last is not None and at > last and not size), None)


class _Sums:
    """Cells of the gradients, or of parameters to be averaged, that a collective sums over ranks."""

    def __init__(self, step: StepEvents, what: str, carried: Sequence[StepEvent]) -> None:
        self.step, self.what, self.carried = step, what, carried
        self.calls = self._calls()
        self.num_calls = 1 + max(self.calls, default=0)
        kinds = [m.kind for m in carried if m.phase.startswith("reduce-scatter")]
        self.outer = kinds[0] if kinds else ""
        inner = [m for m in carried if m.kind in kinds and m.kind != self.outer]
        self.nested = inner[0].kind if inner else ""
        """Inner collective that sums the chunks scattered by the outer one, such as between nodes; empty if none."""
        self.split = 1 + max(map(_chunk, inner), default=0)
        self.chunks = 1 + max((_chunk(m) for m in carried if m.kind != self.nested), default=0)
        self.owned = {
            m.peer: _chunk(m) for m in carried if m.kind == self.outer and m.phase.startswith("reduce-")
        }

    def cells(self) -> Iterator[Cell]:
        parts = [range(self.num_calls * self.split)] * self.chunks
        masks, keys = self._own(parts)
        for message, call in zip(self.carried, self.calls, strict=True):
            if message.kind == self.nested:
                chosen = [(self.owned[message.rank], call * self.split + _chunk(message))]
            else:
                chosen = [(_chunk(message), call * self.split + k) for k in range(self.split)]
            for each in chosen:
                self._move(message, masks, keys, each)
        self._unlisted(keys)
        for rank in range(self.step.world_size):
            for chunk, own in enumerate(parts):
                yield Cell(rank, self.what, chunk, len(own), _mean([keys[rank, (chunk, k)] for k in own]))

    def _calls(self) -> list[int]:
        """Return each message's index of the collective call: the number of earlier messages with equal fields."""
        seen: dict[Any, int] = defaultdict(int)
        numbers = []
        for m in self.carried:
            key = (m.kind, m.rank, m.peer, m.item, m.phase)
            numbers.append(seen[key])
            seen[key] += 1
        return numbers

    def _own(self, parts: Sequence[range]) -> tuple[dict[Any, list[tuple[float, int]]], dict[Any, Keys]]:
        """Return masks of the ranks whose gradients each rank holds, and fill levels: at first only its own."""
        ranks, share = range(self.step.world_size), 1 / self.step.world_size
        masks: dict[Any, list[tuple[float, int]]] = {}
        keys: dict[Any, Keys] = {}
        for rank in ranks:
            spans = [
                e for e in self.step.events if e.rank == rank and e.kind == "backward" and e.peer is None
            ]
            for chunk, own in enumerate(parts):
                for part in own:
                    place = rank, (chunk, part)
                    masks[place], keys[place] = [], [(0.0, 0.0)]
                    if self.what != GRADIENTS:
                        masks[place], keys[place] = [(0.0, 1 << rank)], [(0.0, share)]
                    elif spans:
                        start, end = _share(spans, part // self.split, self.num_calls)
                        masks[place] = [(end, 1 << rank)]
                        keys[place] += [(start, 0.0), (end, share)]
        return masks, keys

    def _move(self, message: StepEvent, masks: Any, keys: dict[Any, Keys], cell: tuple[int, int]) -> None:
        """Add what the sender holds at the start of a message to what the receiver holds at its end."""
        world = self.step.world_size
        here, there = (message.rank, cell), (message.peer, cell)
        at_start = [mask for at, mask in masks[here] if at <= message.start_s + _SAME_TIME_S]
        sent = at_start[-1] if at_start else 1 << message.rank
        before = masks[there][-1][1] if masks[there] else 0
        is_moved = sent != (1 << world) - 1 and "packet" not in message.item and self.what == GRADIENTS
        if is_moved:
            masks[here].append((message.end_s, 0))
            keys[here] += [(message.start_s, sent.bit_count() / world), (message.end_s, 0.0)]
        masks[there].append((message.end_s, before | sent))
        level = (before | sent).bit_count() / world
        if keys[there][-1][0] >= message.end_s - _SAME_TIME_S:  # arrives together with another message
            keys[there][-1] = (keys[there][-1][0], level)
        else:
            keys[there] += [(message.start_s, before.bit_count() / world), (message.end_s, level)]

    def _unlisted(self, keys: dict[Any, Keys]) -> None:
        """Fill the cells during a collective whose messages were not recorded."""
        for e in self.step.events:
            if not self.carried and e.lane == "communication" and e.item == self.what:
                for (rank, _), own in keys.items():
                    if rank == e.rank:
                        own += [(e.start_s, own[-1][1]), (e.end_s, 1.0)]


def _chunk(message: StepEvent) -> int:
    found = _CHUNK.match(message.item)
    return int(found[1]) if found else 0


def _share(spans: Sequence[StepEvent], part: int, parts: int) -> tuple[float, float]:
    """Return the start and end, in seconds, of one of `parts` equal shares of the compute time of `spans`."""
    ends = np.cumsum([e.end_s - e.start_s for e in spans])
    first, last = ends[-1] * part / parts, ends[-1] * (part + 1) / parts

    def at(done: float, *, is_start: bool) -> float:
        k = min(int(np.searchsorted(ends, done + (1 if is_start else -1) * 1e-9 * ends[-1])), len(spans) - 1)
        return float(spans[k].end_s - max(0.0, ends[k] - done))

    return at(first, is_start=True), at(last, is_start=False)


def _mean(parts: Sequence[Keys]) -> Keys:
    """Return the mean fill level of several parts, at every time at which one of them has a key."""
    rows = [_increasing(keys) for keys in parts]
    times = sorted({at for row in rows for at, _ in row})
    total = sum(np.interp(times, [at for at, _ in row], [level for _, level in row]) for row in rows) / len(
        rows
    )
    return [(at, round(float(level), 4)) for at, level in zip(times, np.atleast_1d(total), strict=True)]


def _increasing(keys: Keys) -> Keys:
    """Return keys in order of time, at strictly increasing times."""
    done: Keys = []
    for at, level in keys:
        done.append((at if not done or at > done[-1][0] else done[-1][0] + _SOONEST_S, level))
    return done
