"""Rows of a comparison for bytes and messages, by collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardscope.analytic.communication import Traffic
from shardscope.analytic.communication.traffic import Sent, together
from shardscope.measure.compare.comparison import ComparedTerm, Group
from shardscope.measure.compare.measured import CountedSteps, Ints, Steps, counted, warmed_up
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.observed import ObservedPrediction

_MOST_STEPS = 50
"""Maximum number of steps whose traffic is compared: the newest ones. Each step is predicted separately."""


STEP, COMPRESSED_STEP = "step", "compressed step"


def after_warm_up(prediction: JobPrediction | ObservedPrediction, steps: Steps) -> Steps:
    """Return the steps after the compression's own warm-up; all steps if the run is shorter than that."""
    job = prediction.job
    last = job.compression.uncompressed(job.steps)
    return {number: row for number, row in steps.items() if number > last} or steps


def kind_of_step(prediction: JobPrediction | ObservedPrediction, steps: Steps) -> str:
    """Return the kind of step that is compared: `COMPRESSED_STEP` if uncompressed steps are left out, else `STEP`."""
    return COMPRESSED_STEP if len(after_warm_up(prediction, steps)) < len(steps) else STEP


def compared_steps(prediction: JobPrediction | ObservedPrediction, steps: Steps) -> list[int]:
    """Return the numbers of the newest steps after the warm-up: whole periods of the compression, if possible."""
    numbers, period = warmed_up(after_warm_up(prediction, steps)), prediction.job.compression.period
    most = max(_MOST_STEPS // period, 1) * period
    return numbers[-(min(most, len(numbers) // period * period) or len(numbers)) :]


def traffic_rows(
    prediction: JobPrediction | ObservedPrediction, steps: Steps, notes: list[str]
) -> Iterator[ComparedTerm]:
    """Yield the rows of all collectives, bytes first, and a total for each group; add to `notes` what is left out."""
    numbers = compared_steps(prediction, steps)
    predicted = _predicted(prediction, numbers)
    if predicted is None:
        notes.append("Bytes and messages are left out: the strategy has no formula for its traffic.")
        return
    measured = counted([steps[number] for number in numbers], prediction.job.world_size)
    names = [name for name, sent in predicted.items() if name in measured or sent.bytes.any()]
    _note(names, numbers, predicted, measured, notes, per=kind_of_step(prediction, steps))
    nothing = CountedSteps(*np.zeros((2, prediction.job.world_size), dtype=np.int64))
    groups: tuple[Group, ...] = ("bytes", "messages")
    is_by_rank = isinstance(
        prediction, JobPrediction
    )  # for DDP's own buckets, only the sum over ranks is exact
    for group in groups:
        found = [
            _row(
                group, name, predicted[name], measured.get(name, nothing), len(numbers), is_by_rank=is_by_rank
            )
            for name in names
        ]
        rows = [row for row in found if row.predicted or row.measured]
        yield from rows
        if len(rows) > 1:
            yield _total(group, rows)


def _predicted(prediction: JobPrediction | ObservedPrediction, numbers: Sequence[int]) -> Traffic | None:
    """Return the predicted traffic summed over several steps; None if it is unknown."""
    each = [prediction.at_step(number).traffic for number in numbers]
    known = [traffic for traffic in each if traffic is not None]
    return together(known) if len(known) == len(each) else None


def _note(
    names: Sequence[str],
    numbers: Sequence[int],
    predicted: Traffic,
    measured: dict[str, CountedSteps],
    notes: list[str],
    *,
    per: str,
) -> None:
    if names:
        which = (
            f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}, per {per}"
        )
        notes.append(f"Bytes and messages are from {which}, summed over all ranks.")
    unknown = [name for name in names if predicted[name].bytes.any() and not predicted[name].messages.any()]
    if unknown:
        notes.append(f"Messages of {', '.join(unknown)} are left out: the backend does not report them.")
    unforeseen = [name for name in measured if name not in predicted]
    if unforeseen:
        notes.append(f"Traffic of {', '.join(unforeseen)} is left out: the prediction has no term for it.")


def _row(
    group: Group, name: str, sent: Sent, found: CountedSteps, num_steps: int, *, is_by_rank: bool
) -> ComparedTerm:
    """Return the row of one collective from totals over several steps, checked on each rank or as a sum over ranks.

    Messages are not checked if only bounds on the bytes are known.
    """
    predicted: Ints = getattr(sent, group)
    measured: Ints = getattr(found, group)
    bounds = sent.bounds if group == "bytes" else None
    low, high = bounds or (predicted, predicted)
    is_judged = group == "bytes" or sent.is_exact
    return ComparedTerm(
        group, name, group, "all ranks", float(predicted.sum() / num_steps), float(measured.sum() / num_steps),
        bounds=None if bounds is None else (float(low.sum() / num_steps), float(high.sum() / num_steps)),
        agrees=_is_within(measured, low, high, is_by_rank=is_by_rank) if is_judged else None,
        by_rank=tuple(zip((predicted / num_steps).tolist(), (measured / num_steps).tolist(), strict=True)),
    )  # fmt: skip


def _is_within(measured: Ints, low: Ints, high: Ints, *, is_by_rank: bool) -> bool:
    if is_by_rank:
        return bool(((low <= measured) & (measured <= high)).all())
    return bool(low.sum() <= measured.sum() <= high.sum())


def _total(group: Group, rows: Sequence[ComparedTerm]) -> ComparedTerm:
    """Return the row with the sums over the rows of a group."""
    ends = [row.bounds or (row.predicted, row.predicted) for row in rows]
    by_rank = tuple(
        (sum(predicted for predicted, _ in pairs), sum(measured for _, measured in pairs))
        for pairs in zip(*(row.by_rank for row in rows), strict=True)
    )
    bounds = (sum(low for low, _ in ends), sum(high for _, high in ends))
    judged = [row.agrees for row in rows]
    return ComparedTerm(
        group, "all collectives", group, "all ranks",
        sum(row.predicted for row in rows), sum(row.measured for row in rows),
        bounds=bounds if any(row.bounds for row in rows) else None,
        agrees=None if None in judged else all(judged), by_rank=by_rank,
    )  # fmt: skip
