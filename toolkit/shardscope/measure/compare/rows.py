"""Rows of a comparison, with simulated values: bytes and messages by collective, memory by type, step time by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication import Traffic
from shardscope.analytic.communication.traffic import Sent, together
from shardscope.analytic.terms import Term
from shardscope.errors import SpecError
from shardscope.measure.compare.comparison import ComparedTerm, Group
from shardscope.measure.compare.measured import (
    ALL_WORKERS,
    COMMUNICATION,
    PARTS,
    REST,
    CountedSteps,
    Ints,
    Steps,
    StepTime,
    all_workers_s,
    counted,
    held_by_kind,
    slowest_rank_s,
    step_time,
    warmed_up,
)
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.job_memory import held_at_once
from shardscope.prediction.loads import step_seconds
from shardscope.prediction.observed import ObservedPrediction
from shardscope.runlog.axes import axis_of
from shardscope.runlog.schema import MEMORY_KINDS, Event
from shardscope.simulator import Simulation, simulate, step_events_of
from shardscope.spec.units import figure

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
    """Yield the rows of all collectives, bytes first, and a total for each group; add omissions to `notes`."""
    numbers = compared_steps(prediction, steps)
    predicted = _predicted_traffic(prediction, numbers)
    if predicted is None:
        notes.append("Bytes and messages are left out: the strategy has no formula for its traffic.")
        return
    measured = counted([steps[number] for number in numbers], prediction.job.world_size)
    names = [name for name, sent in predicted.items() if name in measured or sent.bytes.any()]
    _note_traffic(names, numbers, predicted, measured, notes, per=kind_of_step(prediction, steps))
    nothing = CountedSteps(*np.zeros((2, prediction.job.world_size), dtype=np.int64))
    groups: tuple[Group, ...] = ("bytes", "messages")
    is_by_rank = isinstance(
        prediction, JobPrediction
    )  # for DDP's own buckets, only the sum over ranks is exact
    for group in groups:
        found = [
            _traffic_row(
                group, name, predicted[name], measured.get(name, nothing), len(numbers), is_by_rank=is_by_rank
            )
            for name in names
        ]
        rows = [row for row in found if row.predicted or row.measured]
        yield from _by_axis(rows, partial(_traffic_total, group))
        if len(rows) > 1:
            yield _traffic_total(group, rows)


def _by_axis(
    rows: Sequence[ComparedTerm], total: Callable[[Sequence[ComparedTerm]], ComparedTerm]
) -> Iterator[ComparedTerm]:
    """Yield the rows of collectives, those of each axis of a mesh after their sum; `total` sums some rows."""
    for axis in dict.fromkeys(axis_of(row.term) for row in rows):
        own = [row for row in rows if axis_of(row.term) == axis]
        if axis is None:
            yield from own
        else:
            name = f"{axis} axis"
            yield replace(total(own), term=name, part_of=own[0].part_of)
            yield from (replace(row, part_of=name) for row in own)


def _predicted_traffic(
    prediction: JobPrediction | ObservedPrediction, numbers: Sequence[int]
) -> Traffic | None:
    """Return the predicted traffic summed over several steps; None if it is unknown."""
    each = [prediction.at_step(number).traffic for number in numbers]
    known = [traffic for traffic in each if traffic is not None]
    return together(known) if len(known) == len(each) else None


def _note_traffic(
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


def _traffic_row(
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


def _traffic_total(group: Group, rows: Sequence[ComparedTerm]) -> ComparedTerm:
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


_EXACT_KINDS = frozenset({"parameters", "gradients", "optimizer", "buffers"})

_BRIEF = (
    "This is the peak of these types combined. The prediction's `memory`, {whole}, also counts the "
    "batch, temporary tensors and gradients of activations, which runs do not record."
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
    yield from _kind_rows(prediction, held, notes)
    if isinstance(prediction, ObservedPrediction):
        notes.append("peak is left out: only model states are predicted for an observed training loop.")
        return
    if prediction.by_rank is None:
        notes.append(
            "peak is left out: no formula, the loss was not traced, or a layer passes on no gradient."
        )
        return
    if "peak" not in held:
        notes.append("peak is left out: this run was recorded by a version that did not measure it.")
        return
    whole = max(term.value for term in prediction.by_rank)
    notes.append(_BRIEF.format(whole=figure(whole, "bytes")))
    yield _memory_row(
        "peak",
        held_at_once(prediction.step, prediction.kinds, prediction.by_rank),
        held["peak"],
        is_judged=False,
    )


def _kind_rows(
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
            yield _memory_row(kind, predicted, measured, is_judged=is_exact and kind in _EXACT_KINDS)


def _memory_row(name: str, predicted: npt.NDArray[Any], measured: Ints, *, is_judged: bool) -> ComparedTerm:
    return ComparedTerm(
        "memory", name, "bytes", "peak per rank", float(predicted.max()), float(measured.max()),
        agrees=bool((predicted == measured).all()) if is_judged else None,
        by_rank=tuple(zip(predicted.tolist(), measured.tolist(), strict=True)),
    )  # fmt: skip


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
    """Yield the rows, and before the row of the whole step a row for the remainder that its parts do not cover."""
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
    """Return the step's value minus the sum of its parts' values in a column; None if the column is incomplete."""
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
            f"Parts are medians over {many} of the time of one gradient on {where}; a step is the time in which all "
            "workers together compute its gradients."
        )
    return (
        f"Parts of the step are medians over {many} on {where}; they need not add up to the median step time."
    )


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
        yield _time_row(name, predicted.get(name, 0.0), found.parts.get(name, 0.0), found)
        if name == COMMUNICATION:
            yield from _collective_rows(trees, found, notes)


def _parts_of(tree: Term) -> list[Term]:
    """Return the parts of a step; the computation is split into its passes if the prediction has them."""
    inside = {part.name: any(each.name in PARTS for each in part.parts) for part in tree.parts}
    return [each for part in tree.parts for each in (part.parts if inside[part.name] else (part,))]


def _left_out(
    name: str, predicted: Mapping[str, float], measured: Mapping[str, float], *, is_complete: bool
) -> str | None:
    """Return a sentence on why a part has no row; None if it has one.

    The prediction for this machine (`is_complete`) covers all parts except compression: any other part that it lacks is
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
        rows = [
            _time_row(name, predicted[name], value, found, part_of=COMMUNICATION)
            for name, value in found.collectives.items()
        ]
        yield from _by_axis(rows, _time_total)
    else:
        notes.append(
            f"Times of single collectives are left out: the run has {', '.join(found.collectives)}, but the "
            f"prediction has {', '.join(predicted) or 'none'}."
        )


def _time_row(
    name: str, predicted: float, measured: float, found: StepTime, *, part_of: str | None = None
) -> ComparedTerm:
    return ComparedTerm("time", name, "s", f"rank {found.rank}", predicted, measured, part_of=part_of)


def _time_total(rows: Sequence[ComparedTerm]) -> ComparedTerm:
    return replace(
        rows[0], predicted=sum(row.predicted for row in rows), measured=sum(row.measured for row in rows)
    )


def _means(trees: Sequence[Sequence[Term]]) -> dict[str, float]:
    """Return the mean of each term over several steps; a step without the term counts as 0."""
    names = dict.fromkeys(part.name for parts in trees for part in parts)
    return {
        name: _mean([sum(part.value for part in parts if part.name == name) for parts in trees])
        for name in names
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_ALL = "all collectives"
_Values = Mapping[tuple[str, str], float]
"""Simulated values by group and term."""


def with_simulation(
    rows: Iterable[ComparedTerm], prediction: JobPrediction, notes: list[str], *, per: str
) -> Iterator[ComparedTerm]:
    """Yield the rows of a comparison with their simulated values; if any are missing, append the reason to `notes`.

    Args:
        rows: The rows, of all groups.
        prediction: The prediction of a step.
        notes: Sentences about the comparison.
        per: Name of the row of the whole step.
    """
    given = list(rows)
    simulation = simulation_of(prediction, notes)
    if simulation is None:
        yield from given
        return
    found = {**_traffic(simulation), **_memory(prediction, given, notes), **_times(simulation, given, per)}
    for group in ("bytes", "messages"):
        found |= _totals(group, given, found)
    without = [row for row in given if (row.group, row.term) not in found and row.group != "memory"]
    if without:
        named = ", ".join(dict.fromkeys(f"{row.group} of {row.term}" for row in without))
        notes.append(f"Without a simulated value of their own: {named}.")
    for row in given:
        yield replace(row, simulated=found.get((row.group, row.term)))


def simulation_of(prediction: JobPrediction, notes: list[str]) -> Simulation | None:
    """Return a simulated step of a predicted job; if it cannot be simulated, return None and add a note."""
    job = prediction.job
    if job.compression.period > 1:
        notes.append("There is no simulated step: the steps of a period differ.")
        return None
    if job.strategy.drift(job.world_size) != 0 and not job.strategy.num_dropped:
        notes.append(
            "There is no simulated step: ranks need not be in the same step; see ss.simulate.asynchronous."
        )
        return None
    if prediction.time is None:
        return None  # why there is no step time is already among the notes
    try:
        return simulate.predicted(prediction)
    except SpecError as error:
        notes.append(f"There is no simulated step: {error}")
        return None


def _traffic(simulation: Simulation) -> dict[tuple[str, str], float]:
    frame = simulation.collectives()
    found = {}
    for name, num_bytes, messages in zip(*(frame[column].tolist() for column in frame), strict=True):
        found["bytes", name] = num_bytes
        if not isnan(messages):
            found["messages", name] = messages
    return found


def _totals(group: str, rows: Iterable[ComparedTerm], found: _Values) -> dict[tuple[str, str], float]:
    """Return the sums over the collectives of a group, and of each of its axes; no sum with an unknown value."""
    own = [row for row in rows if row.group == group]
    sums = {_ALL, *(row.part_of for row in own if row.part_of)}
    collectives = [row for row in own if row.term not in sums]
    parts = {name: [row.term for row in collectives if name in (_ALL, row.part_of)] for name in sorted(sums)}
    return {
        (group, name): sum(found[group, term] for term in terms)
        for name, terms in parts.items()
        if all((group, term) in found for term in terms)
    }


def _memory(
    prediction: JobPrediction, rows: Iterable[ComparedTerm], notes: list[str]
) -> dict[tuple[str, str], float]:
    """Return the peak of each type of memory on any rank, in a step whose passes and messages are scheduled."""
    if not any(row.group == "memory" for row in rows):
        return {}
    try:
        step = step_events_of(prediction)
    except SpecError as error:
        notes.append(f"There is no simulated memory: {error}")
        return {}
    notes.append("Simulated memory is the predicted memory of each type, allocated at the simulated times.")
    found = {
        ("memory", kind): float(max(point.held[place] for point in step.memory))
        for place, kind in enumerate(MEMORY_KINDS)
    }
    return {**found, ("memory", "peak"): float(max(step.peak_bytes))}


def _times(simulation: Simulation, rows: Iterable[ComparedTerm], per: str) -> dict[tuple[str, str], float]:
    """Return the seconds of each part of the step; a part that the simulation does not have takes no time.

    An axis of a mesh takes as long as its collectives together.
    """
    terms = {term.name: term.value for term in reversed(list(simulation.time.walk()))}
    own = [row for row in rows if row.group == "time"]

    def within(whole: str) -> float:
        return sum((terms.get(row.term, 0.0) for row in own if row.part_of == whole), 0.0)

    return {
        ("time", row.term): terms["step"] if row.term == per else terms.get(row.term, within(row.term))
        for row in own
    }
