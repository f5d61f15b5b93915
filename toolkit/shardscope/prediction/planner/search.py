"""Search through all candidates a chunk at a time: which fit, their time and memory, and which can still be best.

The search is exact. A row is skipped early only if the part of its time that does not depend on how model states are
held already exceeds the whole time of `keep` layouts, each with as much memory left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic import pareto
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import MemoryParts, device_memory
from shardscope.analytic.memory.offload import drive_room, host_room
from shardscope.prediction.planner.candidates import Candidates
from shardscope.prediction.planner.rules import Ints
from shardscope.prediction.step import StepParts, step_time
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]

CHUNK = 1 << 16
"""Rows processed at a time: some 10 MB for all columns, whatever the size of the space."""


class SearchSettings(NamedTuple):
    """Settings shared by all layouts."""

    model: Transformer
    cluster: Cluster
    calibration: Calibration


class RankedRows(NamedTuple):
    """Layouts by their indices into the nested tables, with their time and memory."""

    body: Ints
    way: Ints
    compression: Ints
    time_s: Floats
    memory_bytes: Floats

    def at(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> RankedRows:
        """Select some of the rows."""
        return RankedRows(*(column[rows] for column in self))  # type: ignore[arg-type]

    def plus(self, other: RankedRows) -> RankedRows:
        """Append the rows of `other`."""
        return RankedRows(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


class Promising(NamedTuple):
    """Rows that fit and may be among the best, not timed yet."""

    body: Ints
    way: Ints
    memory_bytes: Floats
    drive_share: Floats


class Closest(NamedTuple):
    """The layout that lacks the least memory, on its device and on its host and drives."""

    row: RankedRows
    lacking_bytes: float


class Found(NamedTuple):
    """Result of a search."""

    rows: RankedRows
    too_large: int
    """Number of layouts that do not fit."""
    beaten: int
    closest: Closest
    """The layout closest to fitting, if nothing fits."""


EMPTY = RankedRows(*(np.zeros(0, np.int64),) * 3, *(np.zeros(0),) * 2)


def search(setting: SearchSettings, found: Candidates, *, keep: int | None) -> Found:
    """Score every candidate and keep the first `keep` Pareto fronts, or every layout that fits if `keep` is None.

    On a mixed cluster the cut of the layers depends on the memory left, so no row is skipped early there.
    """
    if keep is not None and setting.cluster.groups:
        every = search(setting, found, keep=None)
        rows, _ = _best(every.rows, capacity(setting), keep)
        return every._replace(rows=rows, beaten=len(every.rows.time_s) - len(rows.time_s))
    least = least_times(setting, found)
    order = np.argsort(least, kind="stable")
    rows, bar, closest = EMPTY, Staircase(np.zeros((0, 2))), Closest(EMPTY, np.inf)
    kept: list[RankedRows] = []
    fits_count = too_large = 0
    for body, way in _chunks(found, order):
        held = memory_parts(setting, found.layouts(body, way, np.zeros(len(body), np.int64)))
        memory, lacking = held.total, lacking_bytes(setting, held)
        fits, choices = lacking <= 0, found.compressions[found.bodies.grid[body]]
        fits_count += int(choices[fits].sum())
        too_large += int(choices[~fits].sum())
        if not fits_count:
            closest = _closer(closest, body, way, memory, lacking)
        promising = np.flatnonzero(fits)
        if keep is not None:
            beaten = bar.beats(least[body[promising]], memory[promising] - capacity(setting))
            promising = promising[~beaten]
        if not len(promising):
            continue
        rows_left = Promising(body[promising], way[promising], memory[promising], held.drive_share[promising])
        new = _timed(setting, found, rows_left)
        if keep is None:
            kept.append(new)
            continue
        rows, bar = _best(rows.plus(new), capacity(setting), keep)
    if keep is None:
        rows = RankedRows(*(np.concatenate(part) for part in zip(*kept, strict=True))) if kept else EMPTY
    return Found(rows, too_large, fits_count - len(rows.time_s), closest)


def least_times(setting: SearchSettings, found: Candidates) -> Floats:
    """Lower bound of each body's step time in seconds, without the parts that depend on how model states are held."""
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
    return least * (1 - 1e-12)  # sums of the same parts in another order differ in the last digits


def time_of(setting: SearchSettings, layouts: Layouts, drive_share: Floats | None = None) -> StepParts:
    """Seconds of a step, part by part; `drive_share` is `MemoryParts.drive_share` where it is known."""
    model, cluster, calibration = setting
    return step_time(model, layouts, cluster, calibration, drive_share=drive_share)


def lacking_bytes(setting: SearchSettings, held: MemoryParts) -> Floats:
    """Bytes that exceed the fullest device and the host and drives behind it; 0 if everything fits."""
    beyond = np.maximum(held.nvme - drive_room(setting.cluster), 0.0)
    return np.asarray(np.maximum(held.total - capacity(setting), 0.0) + beyond)


def memory_parts(setting: SearchSettings, layouts: Layouts) -> MemoryParts:
    """Bytes by kind; offloaded bytes beyond a device's share of the host count as on its drives."""
    return device_memory(setting.model, layouts, host_capacity=host_room(setting.cluster))


def capacity(setting: SearchSettings) -> float:
    """Memory of one device, in bytes."""
    return float(setting.cluster.device.memory_bytes)


def _chunks(found: Candidates, order: npt.NDArray[np.intp]) -> Iterator[tuple[Ints, Ints]]:
    """Yield chunks of (body, way) indices, the ways of a body together, bodies in the given order."""
    ways = found.ways
    step = max(1, CHUNK // max(1, ways.shape[1]))
    for start in range(0, len(order), step):
        body = order[start : start + step]
        at, way = np.nonzero(ways[found.bodies.grid[body]])
        yield body[at], way


def _timed(setting: SearchSettings, found: Candidates, rows: Promising) -> RankedRows:
    """Expand the rows by compression and time them."""
    choices = found.compressions[found.bodies.grid[rows.body]]
    body, way = np.repeat(rows.body, choices), np.repeat(rows.way, choices)
    memory, share = np.repeat(rows.memory_bytes, choices), np.repeat(rows.drive_share, choices)
    compression = np.arange(len(body)) - np.repeat(np.cumsum(choices) - choices, choices)
    time = time_of(setting, found.layouts(body, way, compression), share).total
    return RankedRows(body, way, compression, time, memory)


def _best(rows: RankedRows, room: float, keep: int) -> tuple[RankedRows, Staircase]:
    """The first `keep` Pareto fronts, which hold the best `keep` rows by any measure, and the last front as a bar."""
    places = np.lexsort((rows.compression, rows.way, rows.body))
    rows = rows.at(places)
    costs = np.stack([rows.time_s, rows.memory_bytes - room]).T
    front = pareto.front_numbers(costs, count=keep, in_turn=True)
    best = np.flatnonzero(front < keep)
    return rows.at(best[pareto.lexical_order(costs[best])]), Staircase(costs[front == keep - 1])


class Staircase:
    """The k-th Pareto front as a bar: k other rows are faster than a row behind it and take no more memory."""

    def __init__(self, costs: Floats) -> None:
        self._time, memory = costs[pareto.lexical_order(costs)].T
        self._least = np.minimum.accumulate(np.concatenate(([np.inf], memory)))

    def beats(self, time: Floats, memory: Floats) -> npt.NDArray[np.bool_]:
        """Whether rows with at least this time and at least this memory are certainly beaten."""
        return np.asarray(self._least[np.searchsorted(self._time, time)] <= memory)


def _closer(before: Closest, body: Ints, way: Ints, memory: Floats, lacking: Floats) -> Closest:
    at = int(np.argmin(lacking))
    if before.lacking_bytes <= lacking[at]:
        return before
    one = slice(at, at + 1)
    row = RankedRows(body[one], way[one], np.zeros(1, np.int64), np.full(1, np.nan), memory[one])
    return Closest(row, float(lacking[at]))
