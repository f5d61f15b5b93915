"""Rows of a comparison for step time, by part of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardscope.analytic.terms import Term
from shardscope.measure.compare.comparison import ComparedTerm
from shardscope.measure.compare.measured import (
    ALL_WORKERS,
    COMMUNICATION,
    PARTS,
    REST,
    Steps,
    StepTime,
    all_workers_s,
    slowest_rank_s,
    step_time,
)
from shardscope.measure.compare.traffic import COMPRESSED_STEP, after_warm_up, compared_steps, kind_of_step
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.loads import step_seconds
from shardscope.spec.units import figure


def time_rows(prediction: JobPrediction, steps: Steps, notes: list[str]) -> Iterator[ComparedTerm]:
    """Yield the rows for the parts of a step and for the whole step; add to `notes` why rows are left out."""
    period = prediction.job.compression.period
    times = [prediction.at_step(number).time for number in compared_steps(prediction, steps)[-period:]]
    trees = [time for time in times if time is not None]
    if len(trees) < len(times):
        notes.append(f"Step time is left out: {prediction.note}")
        return
    compressed, per = after_warm_up(prediction, steps), kind_of_step(prediction, steps)
    if per == COMPRESSED_STEP:
        notes.append(f"Times are from step {min(compressed)} onwards, the first compressed step.")
    is_shared = prediction.job.strategy.is_asynchronous
    found = step_time(compressed, period)
    measured_s = (all_workers_s if is_shared else slowest_rank_s)(compressed, period)
    if found is None:
        notes.append(
            "Parts of the step are left out: no spans were recorded (see Record.spans_first), or the spans do not "
            "cover a period of the compression."
        )
    else:
        notes.append(_scope(found, is_shared=is_shared))
        yield from _part_rows(prediction, trees, found, notes)
    if measured_s is None:
        notes.append(
            f"The whole step is left out: the run is shorter than the compression's period of {period} steps."
        )
    else:
        predicted_s = _mean([step_seconds(prediction.step, tree) for tree in trees])
        yield ComparedTerm(
            "time", per, "s", ALL_WORKERS if is_shared else "slowest rank", predicted_s, measured_s,
            interval=_interval(prediction.at_step(max(compressed)), predicted_s),
        )  # fmt: skip


def with_rest(rows: Iterable[ComparedTerm], per: str) -> Iterator[ComparedTerm]:
    """Yield the rows, and before that of the whole step what its parts lack to add up to it, in each column."""
    given = list(rows)
    parts = [row for row in given if row.group == "time" and row.part_of is None and row.term != per]
    for row in given:
        if (row.group, row.term) == ("time", per) and parts and row.ranks != ALL_WORKERS:
            yield replace(
                row, term=REST, ranks=parts[0].ranks, interval=None,
                **{name: _remainder(name, row, parts) for name in ("predicted", "simulated", "measured", "now")},
            )  # fmt: skip
        yield row


def _remainder(name: str, step: ComparedTerm, parts: Sequence[ComparedTerm]) -> Any:
    """Return what the parts lack in a column; None if the column is incomplete."""
    values = [getattr(row, name) for row in (step, *parts)]
    return None if None in values else round(values[0] - sum(values[1:]), 12)


def _interval(prediction: JobPrediction, seconds: float) -> tuple[float, float] | None:
    """Return the interval around the mean of predicted steps, in seconds, as wide as the interval of one step."""
    if prediction.interval is None or prediction.step_time_s is None:
        return None
    low, high = (end * seconds / prediction.step_time_s for end in prediction.interval)
    return low, high


def _scope(found: StepTime, *, is_shared: bool) -> str:
    many = "one step" if found.num_steps == 1 else f"{found.num_steps} steps"
    where = f"rank {found.rank}, which computes longest"
    if is_shared:
        return (
            f"Parts are medians over {many} of the time of one gradient on {where}; a step is the time in which "
            "all workers together compute as many gradients as it has."
        )
    return f"Parts of the step are medians over {many} on {where}. Medians need not add up."


def _part_rows(
    prediction: JobPrediction, trees: Sequence[Term], found: StepTime, notes: list[str]
) -> Iterator[ComparedTerm]:
    """Yield the rows of the parts of a step, in the order of `PARTS`."""
    predicted = _means([_parts_of(tree) for tree in trees])
    names = [name for name in PARTS if name in predicted or name in found.parts]
    for name in [*names, *(name for name in {**predicted, **found.parts} if name not in PARTS)]:
        why = _left_out(name, predicted, found.parts, is_complete=prediction.cluster is None)
        if why:
            notes.append(why)
            continue
        yield _row(name, predicted.get(name, 0.0), found.parts.get(name, 0.0), found)
        if name == COMMUNICATION:
            yield from _collective_rows(trees, found, notes)


def _parts_of(tree: Term) -> list[Term]:
    """Return the parts of a step; the computation is split into its passes if the prediction has them."""
    inside = {part.name: any(each.name in PARTS for each in part.parts) for part in tree.parts}
    return [each for part in tree.parts for each in (part.parts if inside[part.name] else (part,))]


def _left_out(
    name: str, predicted: Mapping[str, float], measured: Mapping[str, float], *, is_complete: bool
) -> str | None:
    """Return a sentence that says why a part has no row; None if it has one.

    The prediction for this machine (`is_complete`) covers all parts except packing: any other part that it lacks is
    predicted to take no time.
    """
    if name not in predicted and (name not in PARTS or name == "codec" or not is_complete):
        return f"{name} is left out: it took {figure(measured[name], 's')}, but the prediction has no term for it."
    if name not in PARTS:
        return f"{name} is left out: it is predicted ({figure(predicted[name], 's')}), but runs do not measure it."
    return None


def _collective_rows(trees: Sequence[Term], found: StepTime, notes: list[str]) -> Iterator[ComparedTerm]:
    """Yield one row for each collective, if all collectives that the run timed are predicted."""
    parts = [next((part.parts for part in tree.parts if part.name == COMMUNICATION), ()) for tree in trees]
    predicted = _means(parts)
    if found.collectives.keys() <= predicted.keys():
        for name, value in found.collectives.items():
            yield _row(name, predicted[name], value, found, part_of=COMMUNICATION)
    else:
        notes.append(
            f"Times of single collectives are left out: the run has {', '.join(found.collectives)}, but the "
            f"prediction has {', '.join(predicted) or 'none'}."
        )


def _row(
    name: str, predicted: float, measured: float, found: StepTime, *, part_of: str | None = None
) -> ComparedTerm:
    return ComparedTerm("time", name, "s", f"rank {found.rank}", predicted, measured, part_of=part_of)


def _means(trees: Sequence[Sequence[Term]]) -> dict[str, float]:
    """Return the mean of each term over several steps; a step without the term counts as 0."""
    names = dict.fromkeys(part.name for parts in trees for part in parts)
    return {
        name: _mean([sum(part.value for part in parts if part.name == name) for parts in trees])
        for name in names
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
