"""The simulated column of a comparison: one simulated step's bytes, messages, memory, and times by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import isnan

from shardscope.errors import SpecError
from shardscope.measure.compare.comparison import ComparedTerm
from shardscope.prediction.job import JobPrediction
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.simulator import Simulation, simulate, step_events_of

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
        found |= _total(group, given, found)
    without = [row for row in given if (row.group, row.term) not in found and row.group != "memory"]
    if without:
        named = ", ".join(dict.fromkeys(f"{row.group} of {row.term}" for row in without))
        notes.append(f"Not simulated one by one: {named}.")
    for row in given:
        yield replace(row, simulated=found.get((row.group, row.term)))


def simulation_of(prediction: JobPrediction, notes: list[str]) -> Simulation | None:
    """Return a simulated step of a predicted job; None, and a sentence in `notes`, if it cannot be simulated."""
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


def _total(group: str, rows: Iterable[ComparedTerm], found: _Values) -> dict[tuple[str, str], float]:
    """Return the sum over the collectives of a group; nothing if one of them is unknown."""
    terms = [row.term for row in rows if row.group == group and row.term != _ALL]
    if not all((group, term) in found for term in terms):
        return {}
    return {(group, _ALL): sum(found[group, term] for term in terms)}


def _memory(
    prediction: JobPrediction, rows: Iterable[ComparedTerm], notes: list[str]
) -> dict[tuple[str, str], float]:
    """Return the memory of the fullest rank in a step whose passes and messages are placed in time."""
    if not any(row.group == "memory" for row in rows):
        return {}
    try:
        step = step_events_of(prediction)
    except SpecError as error:
        notes.append(f"There is no simulated memory: {error}")
        return {}
    notes.append(
        "Simulated memory is the predicted memory of each type, placed in time; its peak is the simulated one."
    )
    found = {
        ("memory", kind): float(max(point.held[place] for point in step.memory))
        for place, kind in enumerate(MEMORY_KINDS)
    }
    return {**found, ("memory", "peak"): float(max(step.peak_bytes))}


def _times(simulation: Simulation, rows: Iterable[ComparedTerm], per: str) -> dict[tuple[str, str], float]:
    """Return the seconds of each part of the step; a part that the simulation does not have takes no time."""
    terms = {term.name: term.value for term in reversed(list(simulation.time.walk()))}
    return {
        ("time", row.term): terms["step"] if row.term == per else terms.get(row.term, 0.0)
        for row in rows
        if row.group == "time"
    }
