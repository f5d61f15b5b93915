"""Rows of a comparison for memory, by type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

from shardscope.measure.compare.comparison import ComparedTerm
from shardscope.measure.compare.measured import Ints, held_by_kind
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.job_memory import held_at_once
from shardscope.prediction.observed import ObservedPrediction
from shardscope.runlog.schema import MEMORY_KINDS, Event
from shardscope.spec.units import figure

_EXACT_KINDS = frozenset({"parameters", "gradients", "optimizer", "buffers"})

_BRIEF = (
    "The peak is that of these types together. The prediction's `memory`, {whole} on the fullest rank, also counts the "
    "batch, intermediate results and gradients of activations, which runs do not record."
)


def memory_rows(
    prediction: JobPrediction | ObservedPrediction, events: Sequence[Event], notes: list[str]
) -> Iterator[ComparedTerm]:
    """Yield one row for each type of memory, on the rank with the most memory of this type, and one for the peak.

    If rows are left out, sentences that give the reasons are added to `notes`.
    """
    newest = held_by_kind(events, prediction.job.world_size)
    if newest is None:
        notes.append("Memory is left out: no step has measured it (see Record.memory_first).")
        return
    number, held = newest
    notes.append(
        f"Memory is from step {number}: each type at its own peak, and the peak of all types together."
    )
    prediction = prediction.at_step(number)
    yield from _kinds(prediction, held, notes)
    if isinstance(prediction, ObservedPrediction):
        notes.append("peak is left out: only model states are predicted for an observed training loop.")
        return
    if prediction.by_rank is None:
        notes.append("peak is left out: the loss was not traced, or the strategy has no formula.")
        return
    if "peak" not in held:
        notes.append("peak is left out: this run was recorded before it was measured.")
        return
    whole = max(term.value for term in prediction.by_rank)
    notes.append(_BRIEF.format(whole=figure(whole, "bytes")))
    yield _row("peak", held_at_once(prediction.step, prediction.kinds), held["peak"], is_judged=False)


def _kinds(
    prediction: JobPrediction | ObservedPrediction, held: dict[str, Ints], notes: list[str]
) -> Iterator[ComparedTerm]:
    is_exact = prediction.states is not None and prediction.states.is_exact
    for kind in MEMORY_KINDS:
        predicted, measured = prediction.kinds.get(kind), held[kind]
        several = getattr(prediction.job, "num_optimizers", 1)
        if predicted is None and measured.any() and kind == "optimizer" and several > 1:
            notes.append(
                f"optimizer is left out: {several} optimizers update the model, and none is predicted then."
            )
        elif predicted is None and measured.any():
            in_peak = kind == "buffers" and isinstance(prediction, JobPrediction)
            notes.append(
                f"{kind} is left out: there is no formula for it in this job"
                + (", and the predicted peak does not include it." if in_peak else ".")
            )
        elif predicted is not None and (predicted.any() or measured.any()):
            yield _row(kind, predicted, measured, is_judged=is_exact and kind in _EXACT_KINDS)


def _row(name: str, predicted: npt.NDArray[Any], measured: Ints, *, is_judged: bool) -> ComparedTerm:
    return ComparedTerm(
        "memory", name, "bytes", "fullest rank", float(predicted.max()), float(measured.max()),
        agrees=bool((predicted == measured).all()) if is_judged else None,
        by_rank=tuple(zip(predicted.tolist(), measured.tolist(), strict=True)),
    )  # fmt: skip
