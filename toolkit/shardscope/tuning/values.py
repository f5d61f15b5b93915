"""The objectives of a run that has completed: as measured, or by functions of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shardscope.runtime.run import Run
from shardscope.tuning.definition import Definition
from shardscope.tuning.measured import Measured
from shardscope.tuning.objectives import QUALITIES

Objective = Callable[[Run], float]
"""A user's own: from a run that has ended to a number, the less the better."""


def values_of(
    definition: Definition, run: Run, measured: Measured, own: Mapping[str, Objective]
) -> tuple[dict[str, float], str | None]:
    """The objectives of a run that has completed, and what is wrong with them, as a sentence."""
    return _values(dict.fromkeys(definition.objectives, run.job.steps), run, measured, own)


def interval_values(
    names: Sequence[str], run: Run, measured: Measured, own: Mapping[str, Objective]
) -> tuple[dict[str, float], str | None]:
    """The objectives of a run that takes its job a part of the way: quality as it stands there, the others per step."""
    return _values(
        {name: run.job.last_step if name in QUALITIES else 1 for name in names}, run, measured, own
    )


def _values(
    steps: Mapping[str, int], run: Run, measured: Measured, own: Mapping[str, Objective]
) -> tuple[dict[str, float], str | None]:
    """By objective, each over so many steps."""
    values: dict[str, float] = {}
    for name, count in steps.items():
        value = _own_value(name, own[name], run) if name in own else measured.objective(name, count)
        if isinstance(value, str):
            return {}, value
        if value is None or not math.isfinite(value):
            return {}, f"objective {name!r} came to {value}; a trial needs a finite number"
        values[name] = float(value)
    return values, None


def _own_value(name: str, objective: Objective, run: Run) -> float | str:
    """The value, or what the user's function raised, as a sentence: it may raise anything, and ends one trial."""
    try:
        return float(objective(run))
    except Exception as error:
        return f"objective {name!r} raised {type(error).__name__}: {error}"
