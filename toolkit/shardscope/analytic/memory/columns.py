"""Which part of the model a pipeline rank holds, and how many micro-batches at once; an array for each layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.schedules.closed import columns

Floats = npt.NDArray[np.float64]


class Pipeline(NamedTuple):
    """Of each layout, what does not depend on the place in its pipeline."""

    ranks: Floats
    microbatches: Floats
    chunks: Floats
    """Parts of the model on each rank that are not next to each other."""
    interleaved: npt.NDArray[np.bool_]
    rounded: npt.NDArray[np.bool_]
    """Whether the schedule is a V of building blocks, which hold whole micro-batches."""
    in_thirds: npt.NDArray[np.bool_]
    """Whether every third rank holds one less where a third of the ranks leaves two thirds over."""
    head_at: Floats
    """Place of the output projection: a V-shaped schedule brings it back to the first rank."""
    layers: Floats
    """On each rank."""
    rest: Floats
    """Layers that are left over: one more for each of the first ranks."""
    of_left: Floats
    of_all: Floats
    constant: Floats


class Holding(NamedTuple):
    """Of one pipeline rank."""

    layers: Floats
    mixed: Floats | None
    """Of the layers, those with experts; None where the model has none."""
    embedding: Floats
    """1 on the rank that holds it, else 0."""
    head: Floats
    """1 on the rank that holds it, else 0."""
    in_flight: Floats
    """Micro-batches whose activations it keeps, in units of the whole rank."""


def pipeline_of(layouts: Layouts, layers: int) -> Pipeline:
    """The pipelines of the layouts, for a model of so many layers."""
    ranks, schedule = layouts.pipeline.astype(float), layouts.schedule
    known = columns()
    folded, interleaved = known.v_shaped[schedule], known.leaves_stages[schedule]
    own = np.floor(layers / ranks)
    return Pipeline(
        ranks=ranks,
        microbatches=layouts.num_micro_batches.astype(float),
        chunks=np.where(interleaved, layouts.virtual_stages, 1.0 + folded),
        interleaved=interleaved & (layouts.virtual_stages > 1),
        rounded=known.is_rounded[schedule],
        in_thirds=known.in_thirds[schedule],
        head_at=(ranks - 1) * ~folded,
        layers=own,
        rest=layers - own * ranks,
        of_left=known.of_left[schedule],
        of_all=known.of_all[schedule],
        constant=known.constant[schedule],
    )


def held_by(place: Floats, pipeline: Pipeline, *, dense: int | None) -> Holding:
    """What the rank at `place` holds.

    Args:
        place: In the pipeline, from 0, one for each layout.
        pipeline: The layouts' pipelines.
        dense: How many of the first layers have no experts; None where none has.
    """
    own = pipeline.layers + (place < pipeline.rest)
    mixed = None
    if dense is not None:
        chunk = own / pipeline.chunks
        mixed = own - np.minimum(np.maximum(dense - place * chunk, 0.0), chunk)
    return Holding(
        layers=own,
        mixed=mixed,
        embedding=(place == 0).astype(float),
        head=(place == pipeline.head_at).astype(float),
        in_flight=_in_flight(place, pipeline),
    )


def _in_flight(place: Floats, pipeline: Pipeline) -> Floats:
    """Micro-batches in flight on the rank at `place`, in units of the whole rank.

    Interleaved: Korthikanti et al. 2022, section 4.2.3, p (1 + (p-1)/(pv)) on the first rank.
    """
    left, chunks = pipeline.ranks - place, pipeline.chunks
    held = pipeline.of_left * left + pipeline.of_all * pipeline.ranks + pipeline.constant
    if pipeline.interleaved.any():
        whole = (
            (chunks - 1) * pipeline.ranks
            + (2 * left - 1) * pipeline.of_left
            + pipeline.ranks * pipeline.of_all
        )
        held = np.where(pipeline.interleaved, whole / chunks, held)
    if pipeline.rounded.any():
        whole = np.floor(held + 1e-9)
        some = np.flatnonzero(pipeline.in_thirds)  # a remainder takes ten times an addition
        whole[some] -= (pipeline.ranks[some] % 3 == 2) & (np.broadcast_to(place, whole.shape)[some] % 3 == 0)
        held = np.where(pipeline.rounded, np.minimum(whole, (pipeline.microbatches + place + 1) / 2), held)
    return np.minimum(held, pipeline.microbatches)
