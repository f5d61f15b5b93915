"""Find the smallest number of recomputed layers with which layouts fit in memory.

Each additional recomputed layer of a stage reduces the memory that a layout needs. Each layer also costs time, unless
activations are offloaded: then fewer bytes are moved, so recomputing more layers than necessary can be faster, but such
layouts are not searched. The smallest number of layers with which a layout fits is found by narrowing bounds, for all
layouts of a chunk at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.recomputation import layers_of_stage
from shardscope.planner.candidates import Candidates
from shardscope.planner.rules import Ints
from shardscope.planner.setting import SearchSettings, capacity, lacking_bytes, memory_parts
from shardscope.spec.layout import RECOMPUTE_NAMES

Floats = npt.NDArray[np.float64]
NONE = RECOMPUTE_NAMES.index("none")
_CHORDS = 2
"""Number of secant steps before the search switches to bisection, which takes few steps in the worst case."""


class InPart(NamedTuple):
    """Layouts that fit with some layers recomputed."""

    rows: npt.NDArray[np.intp]
    """Indices into the given layouts."""
    layers: Ints
    """Smallest number of layers per stage with which the layout fits."""
    memory_bytes: Floats
    drive_share: Floats


def can_recompute_in_part(found: Candidates) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows of `Candidates.bodies` that recompute nothing, but could recompute part of a stage.

    Recomputing all layers of a stage is a separate row.
    """
    every = np.arange(len(found.bodies.grid))
    can = (found.bodies.recompute == NONE) & (_stage_layers(found, every) > 1)
    return np.asarray(can & found.recomputes_in_part)


def in_part(setting: SearchSettings, found: Candidates, body: Ints, way: Ints, lacking: Floats) -> InPart:
    """Return the layouts that fit with some, but not all, layers of each stage recomputed.

    Args:
        setting: Model, cluster and calibration.
        found: The candidates.
        body: Indices into `Candidates.bodies`.
        way: Indices into `Candidates.ways`.
        lacking: Bytes by which each layout exceeds the memory without recomputation, more than 0.
    """
    high = _stage_layers(found, body) - 1
    held = _held(setting, found, body, way, high)
    rows = np.flatnonzero(held.beyond <= 0)
    body, way, high, held = body[rows], way[rows], high[rows], held.at(rows)
    low, above = np.zeros_like(high), lacking[rows]
    tries = 0
    while len(at := np.flatnonzero(high - low > 1)):
        # memory is convex and nearly linear in the number, so the chord's root fits and is nearly always the smallest
        part = above[at] / (above[at] - held.beyond[at]) if tries < _CHORDS else 0.5
        middle = low[at] + np.ceil((high[at] - low[at]) * part).astype(np.int64)
        middle = np.clip(middle, low[at] + 1, high[at] - 1)
        here, tries = _held(setting, found, body[at], way[at], middle), tries + 1
        fits = here.beyond <= 0
        high[at[fits]] = middle[fits]
        for column, new in zip(held, here, strict=True):
            column[at[fits]] = new[fits]
        low[at[~fits]], above[at[~fits]] = middle[~fits], here.beyond[~fits]
    return InPart(rows, high, held.memory_bytes, held.drive_share)


class _Held(NamedTuple):
    """Memory of some layouts."""

    memory_bytes: Floats
    drive_share: Floats
    beyond: Floats
    """Bytes by which the layout exceeds the capacity; if it fits, the number of free bytes, negated."""

    def at(self, rows: npt.NDArray[np.intp]) -> _Held:
        return _Held(*(column[rows] for column in self))


def _stage_layers(found: Candidates, body: Ints) -> Ints:
    stages = found.bodies.virtual_stages[body] * found.grid.pipeline[found.bodies.grid[body]]
    return np.asarray(layers_of_stage(found.num_layers, stages))


def _held(setting: SearchSettings, found: Candidates, body: Ints, way: Ints, layers: Ints) -> _Held:
    held = memory_parts(setting, found.layouts(body, way, np.zeros_like(body), layers))
    lacking = lacking_bytes(setting, held)
    beyond = np.where(lacking > 0, lacking, held.total - capacity(setting))
    return _Held(held.total, np.array(held.drive_share), beyond)
