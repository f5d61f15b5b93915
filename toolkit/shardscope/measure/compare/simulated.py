"""The simulated column of a comparison: the times of one simulated step, by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardscope.errors import SpecError
from shardscope.measure.compare.comparison import ComparedTerm
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.simulate import simulate


def with_simulation(
    rows: Iterable[ComparedTerm], prediction: JobPrediction, notes: list[str], *, per: str
) -> Iterator[ComparedTerm]:
    """Yield the rows of times with their simulated values; add to `notes` why there are none.

    Args:
        rows: The rows of the parts of a step and of the whole step.
        prediction: The prediction of a step.
        notes: Sentences about the comparison.
        per: Name of the whole step's row.
    """
    found = _simulated(prediction, notes)
    if found is None:
        yield from rows
        return
    for row in rows:
        yield replace(row, simulated=found["step"] if row.term == per else found.get(row.term, 0.0))


def _simulated(prediction: JobPrediction, notes: list[str]) -> dict[str, float] | None:
    """Return the seconds of each term of a simulated step; None if it cannot be simulated."""
    job = prediction.job
    if job.compression.period > 1:
        notes.append("There is no simulated time: the steps of a period differ.")
        return None
    if job.strategy.drift(job.world_size) != 0:
        notes.append(
            "There is no simulated time: ranks need not be in the same step; see ss.simulate.asynchronous."
        )
        return None
    if prediction.time is None:
        return None  # why there is no step time is already among the notes
    try:
        found = simulate.predicted(prediction)
    except SpecError as error:
        notes.append(f"There is no simulated time: {error}")
        return None
    return {term.name: term.value for term in reversed(list(found.time.walk()))}
