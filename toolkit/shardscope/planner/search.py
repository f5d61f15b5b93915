"""Score all candidates in chunks: compute the time and memory of layouts that fit, and keep the best layouts.

The search is exact. Part of a layout's step time does not depend on how model states are stored. A layout is skipped
early only if this part alone exceeds the step time of `keep` other layouts that leave at least as much memory free.
Layouts that do not fit without recomputation are also tried with the fewest recomputed layers that fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic import pareto
from shardscope.analytic.memory import MemoryParts
from shardscope.planner.candidates import Candidates
from shardscope.planner.in_part import can_recompute_in_part, in_part
from shardscope.planner.rank import rounded
from shardscope.planner.rules import Ints
from shardscope.planner.setting import (
    SearchSettings,
    capacity,
    lacking_bytes,
    memory_parts,
    time_of,
)

Floats = npt.NDArray[np.float64]

CHUNK = 1 << 16
"""Number of rows in one chunk; all columns of a chunk take about 10 MB."""


class RankedRows(NamedTuple):
    """Layouts as indices into the nested tables of `Candidates`, with their step time and memory."""

    body: Ints
    way: Ints
    compression: Ints
    recompute_layers: Ints
    """Number of layers per stage that are recomputed to make the layout fit, if the body itself recomputes no layers;
    otherwise 0."""
    time_s: Floats
    memory_bytes: Floats

    def at(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> RankedRows:
        """Return the rows at the given indices, or the rows selected by a mask."""
        return RankedRows(*(column[rows] for column in self))  # type: ignore[arg-type]

    def plus(self, other: RankedRows) -> RankedRows:
        """Return the rows of this table followed by the rows of `other`."""
        return RankedRows(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


class Promising(NamedTuple):
    """Layouts that fit and may be among the best, but whose step times have not been computed yet."""

    body: Ints
    way: Ints
    recompute_layers: Ints
    memory_bytes: Floats
    drive_share: Floats

    def plus(self, other: Promising) -> Promising:
        """Return the rows of this table followed by the rows of `other`."""
        return Promising(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


class Closest(NamedTuple):
    """The layout that comes closest to fitting: it exceeds device and drive capacity by the fewest bytes."""

    row: RankedRows
    lacking_bytes: float


class Found(NamedTuple):
    """Result of a search."""

    rows: RankedRows
    too_large: int
    """Number of layouts that do not fit, not counting layouts kept with some layers recomputed."""
    beaten: int
    """Number of layouts that fit but are not on one of the kept Pareto fronts."""
    closest: Closest
    """The layout closest to fitting; meaningful only if no layout fits."""


EMPTY = RankedRows(*(np.zeros(0, np.int64),) * 4, *(np.zeros(0),) * 2)


def search(setting: SearchSettings, found: Candidates, *, keep: int | None, below_s: float = np.inf) -> Found:
    """Score all candidates and keep the first `keep` Pareto fronts over time and memory.

    On a mixed cluster, the split of the layers depends on the free memory, so no layout is skipped early.

    Args:
        setting: Model, cluster and calibration.
        found: The candidates.
        keep: Number of Pareto fronts to keep; None for every layout that fits.
        below_s: Skip layouts whose step certainly takes this long or longer, in seconds; they are not counted.
    """
    if keep is not None and setting.cluster.groups:
        every = search(setting, found, keep=None, below_s=below_s)
        rows, _ = _best(every.rows, capacity(setting), keep)
        return every._replace(rows=rows, beaten=len(every.rows.time_s) - len(rows.time_s))
    least = least_times(setting, found)
    order, can = np.argsort(least, kind="stable"), can_recompute_in_part(found)
    order = order[least[order] < below_s]
    rows, bar, closest = EMPTY, Staircase(np.zeros((0, 2))), Closest(EMPTY, np.inf)
    kept: list[RankedRows] = []
    fits_count = too_large = 0
    for body, way in _chunks(found, order):
        held = memory_parts(setting, found.layouts(body, way, np.zeros(len(body), np.int64)))
        chunk = _Chunk(body, way, least[body], held, lacking_bytes(setting, held))
        fits, choices = chunk.lacking <= 0, found.compressions[found.bodies.grid[body]]
        fits_count += int(choices[fits].sum())
        too_large += int(choices[~fits].sum())
        if not fits_count:
            closest = _closer(closest, chunk)
        rows_left = _as_they_are(chunk, capacity(setting), bar)
        if (demanding := np.flatnonzero(~fits & can[body])).size:
            rows_left = rows_left.plus(_with_some_recomputed(setting, found, chunk, demanding, bar))
        if not len(rows_left.body):
            continue
        new = _timed(setting, found, rows_left)
        if keep is None:
            kept.append(new)
            continue
        rows, bar = _best(rows.plus(new), capacity(setting), keep)
    if keep is None:
        rows = RankedRows(*(np.concatenate(part) for part in zip(*kept, strict=True))) if kept else EMPTY
    in_parts = int((rows.recompute_layers > 0).sum())
    return Found(rows, too_large - in_parts, fits_count + in_parts - len(rows.time_s), closest)


def least_times(setting: SearchSettings, found: Candidates) -> Floats:
    """Return a lower bound of the step time for each row of `Candidates.bodies`, in seconds.

    The bound consists of the parts that do not depend on how model states are stored.
    """
    least = np.empty(len(found.bodies.grid))
    for start in range(0, len(least), CHUNK):
        body = np.arange(start, min(start + CHUNK, len(least)))
        nothing = np.zeros_like(body)
        layouts = found.layouts(body, nothing, nothing)
        bare = layouts._replace(
            zero=nothing, shard=layouts.data * layouts.context, offload=nothing, compression=nothing
        )
        parts = time_of(setting, bare)
        least[body] = parts.total - parts.data_comm - parts.optimizer
    return least * (1 - 1e-12)  # adding the same parts in a different order changes the last digits


def _chunks(found: Candidates, order: npt.NDArray[np.intp]) -> Iterator[tuple[Ints, Ints]]:
    """Yield chunks of index pairs, into `Candidates.bodies` (in the given order) and into `Candidates.ways`.

    All pairs with the same first index are in the same chunk.
    """
    step = max(1, CHUNK // max(1, len(found.zero)))
    for start in range(0, len(order), step):
        body = order[start : start + step]
        at, way = np.nonzero(found.ways_of(body))
        yield body[at], way


class _Chunk(NamedTuple):
    """Some layouts, with lower bounds of their step times, their memory, and the bytes by which they exceed the
    capacity.
    """

    body: Ints
    way: Ints
    least_s: Floats
    held: MemoryParts
    lacking: Floats


def _as_they_are(chunk: _Chunk, capacity_bytes: float, bar: Staircase) -> Promising:
    """Return the layouts of a chunk that fit and are not certainly dominated."""
    at = np.flatnonzero(chunk.lacking <= 0)
    memory = chunk.held.total
    at = at[~bar.beats(chunk.least_s[at], memory[at] - capacity_bytes)]
    return Promising(chunk.body[at], chunk.way[at], np.zeros_like(at), memory[at], chunk.held.drive_share[at])


def _with_some_recomputed(
    setting: SearchSettings, found: Candidates, chunk: _Chunk, at: npt.NDArray[np.intp], bar: Staircase
) -> Promising:
    """Return the layouts at indices `at` of a chunk that fit with some layers recomputed and may not be dominated.

    Their lower bounds assume that recomputation takes no time and frees all activations.
    """
    least = chunk.held.total[at] - chunk.held.activations[at] - capacity(setting)
    at = at[(least <= 0) & ~bar.beats(chunk.least_s[at], least)]
    if not at.size:
        return Promising(at, at, at, np.zeros(0), np.zeros(0))
    body, way = chunk.body[at], chunk.way[at]
    part = in_part(setting, found, body, way, chunk.lacking[at])
    return Promising(body[part.rows], way[part.rows], *part[1:])


def _timed(setting: SearchSettings, found: Candidates, rows: Promising) -> RankedRows:
    """Combine each row with every compression that its grid allows, and compute the step times."""
    choices = found.compressions[found.bodies.grid[rows.body]]
    body, way = np.repeat(rows.body, choices), np.repeat(rows.way, choices)
    layers = np.repeat(rows.recompute_layers, choices)
    memory, share = np.repeat(rows.memory_bytes, choices), np.repeat(rows.drive_share, choices)
    compression = np.arange(len(body)) - np.repeat(np.cumsum(choices) - choices, choices)
    time = time_of(setting, found.layouts(body, way, compression, layers), share).total
    return RankedRows(body, way, compression, layers, time, memory)


def _best(rows: RankedRows, capacity_bytes: float, keep: int) -> tuple[RankedRows, Staircase]:
    """Return the rows of the first `keep` Pareto fronts, and the last of these fronts.

    These rows include the best `keep` rows by any objective.
    """
    ways, choices = rows.way.max(initial=0) + 1, rows.compression.max(initial=0) + 1
    rows = rows.at(np.argsort((rows.body * ways + rows.way) * choices + rows.compression))
    costs = np.stack([rounded(rows.time_s), np.round(rows.memory_bytes - capacity_bytes)]).T
    front = pareto.front_numbers(costs, count=keep, in_turn=True)
    best = np.flatnonzero(front < keep)
    return rows.at(best[pareto.lexical_order(costs[best])]), Staircase(costs[front == keep - 1])


class Staircase:
    """The k-th Pareto front; a row that it dominates is dominated in time and memory by at least k rows."""

    def __init__(self, costs: Floats) -> None:
        self._time, memory = costs[pareto.lexical_order(costs)].T
        self._least = np.minimum.accumulate(np.concatenate(([np.inf], memory)))

    def beats(self, time: Floats, memory: Floats) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that are certainly dominated, given lower bounds of their time and memory."""
        return np.asarray(self._least[np.searchsorted(self._time, time)] <= memory)


def _closer(before: Closest, chunk: _Chunk) -> Closest:
    if not len(chunk.lacking):
        return before
    at = int(np.argmin(chunk.lacking))
    if before.lacking_bytes <= chunk.lacking[at]:
        return before
    one, none = slice(at, at + 1), np.zeros(1, np.int64)
    row = RankedRows(chunk.body[one], chunk.way[one], none, none, np.full(1, np.nan), chunk.held.total[one])
    return Closest(row, float(chunk.lacking[at]))
