"""Which complete trials no other beats, and which of those owe their place to the noise of measured times alone.

Of two runs alike one is the quicker. Where several objectives are minimised, that would put it on the front beside a
trial that is better in something else and worse in nothing but a time that the next run would turn round. Such trials
are left out, and `Front.by_noise` names them. Every front of a study that is printed, drawn or asked for is this one;
Optuna's `study.best_trials` holds both kinds. A population's front leaves none out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardscope.analytic import pareto

Values = Mapping[str, float]
QUICKER_BY = 0.1
"""A median step of a run differed by 3 to 10 % from that of a run alike, one after the other on a busy machine."""
_TIME = "seconds"


class Front(NamedTuple):
    """Numbers of trials."""

    clear: tuple[int, ...]
    by_noise: tuple[int, ...]
    """Those that no other beats, but for a time that is less than `QUICKER_BY` above that of a trial in `clear`."""

    @property
    def note(self) -> str | None:
        """The second kind, as a sentence; None where there is none."""
        return note_of(self.by_noise)


def front_of(values: Mapping[int, Values]) -> Front:
    """The front of trials by their objectives, all of which are the better the lower.

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
    for row in best[pareto.lexical_order(rest[best])]:  # whoever beats it comes before it
        is_no_slower = (time[clear] * (1 - QUICKER_BY) < time[row]).any(axis=-1)
        if not (pareto.dominates(rest[clear], rest[row]) & is_no_slower).any():
            clear.append(row)
    return Front(
        tuple(numbers[row] for row in best if row in clear),
        tuple(numbers[row] for row in best if row not in clear),
    )


def note_of(by_noise: tuple[int, ...]) -> str | None:
    """Why trials are left out, as a sentence; None where none is."""
    if not by_noise:
        return None
    numbers = ", ".join(map(str, by_noise))
    who, has = (
        (f"Trial {numbers} is", "it has") if len(by_noise) == 1 else (f"Trials {numbers} are", "they have")
    )
    return (
        f"{who} left out: all that {has} before what is on the front is less than {QUICKER_BY:.0%} of time, by which "
        "runs alike differ."
    )
