"""The Pareto front of complete trials, without trials that are on it only because of noise in measured times.

Of two identical runs, one is always slightly faster. With several objectives, timing noise alone can keep a trial on
the front although another trial is better or equal in every other objective, and a rerun could reverse their order.
Such trials are left out and listed in `Front.by_noise`. Every front of a study that is printed, plotted or returned
follows this rule; Optuna's `study.best_trials` includes both groups. The front of a population is not filtered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardscope.analytic import pareto

Values = Mapping[str, float]
QUICKER_BY = 0.1
"""Relative difference in time above which one trial counts as faster than another. The median step times of two
identical runs, one after the other on a busy machine, differed by 3 to 10 %."""
_TIME = "seconds"


class Front(NamedTuple):
    """The trials on the front, as trial numbers in two groups."""

    clear: tuple[int, ...]
    """Trials with an advantage that exceeds the noise of measured times."""
    by_noise: tuple[int, ...]
    """Trials whose only advantage over a trial in `clear` is a time shorter by less than the fraction `QUICKER_BY`."""

    @property
    def note(self) -> str | None:
        """Sentence about the trials in `by_noise`; None if there are none."""
        return note_of(self.by_noise)


def front_of(values: Mapping[int, Values]) -> Front:
    """Return the Pareto front of trials; all objectives are minimised.

    Args:
        values: Values of the objectives by name, for each trial number; all trials have the same objectives.

    Example:
        >>> front_of({0: {"loss": 0.5, "seconds": 1.0}, 1: {"loss": 0.6, "seconds": 0.97}}).by_noise
        (1,)
    """
    numbers, names = [*values], sorted(next(iter(values.values()), ()))
    costs = np.array([[own[name] for name in names] for own in values.values()]).reshape(
        len(values), len(names)
    )
    is_time = np.array([name == _TIME for name in names], bool)
    time, rest = costs[:, is_time], costs[:, ~is_time]
    best = pareto.front(costs)
    clear: list[int] = []
    for row in best[pareto.lexical_order(rest[best])]:  # a trial comes after all trials that dominate it
        is_no_slower = (time[clear] * (1 - QUICKER_BY) < time[row]).any(axis=-1)
        if not (pareto.dominates(rest[clear], rest[row]) & is_no_slower).any():
            clear.append(row)
    return Front(
        tuple(numbers[row] for row in best if row in clear),
        tuple(numbers[row] for row in best if row not in clear),
    )


def note_of(by_noise: tuple[int, ...]) -> str | None:
    """Return a sentence on which trials are left out and why; None if none are."""
    if not by_noise:
        return None
    numbers = ", ".join(map(str, by_noise))
    who, are = (
        (f"Trial {numbers} is", "it is") if len(by_noise) == 1 else (f"Trials {numbers} are", "they are")
    )
    return f"{who} not on the front: {are} only faster, by less than the noise of measured times ({QUICKER_BY:.0%})."
