"""Which complete trials no other beats, and which of those owe their place to the noise of measured times alone.

Of two runs alike one is the quicker. Where several objectives are minimised, that would put it on the front beside a
trial that is better in something else and worse in nothing but a time that the next run would turn round. Such trials
are left out, and `Front.by_noise` names them. Every front of a study that is printed, drawn or asked for is this one;
Optuna's `study.best_trials` holds both kinds. A population's front leaves none out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
    best = [
        number
        for number, own in values.items()
        if not any(dominates(other, own) for other in values.values())
    ]
    clear: list[int] = []
    for number in sorted(
        best, key=lambda number: _all_but_time(values[number])
    ):  # whoever beats it comes before it
        if not any(_beats_but_for_noise(values[other], values[number]) for other in clear):
            clear.append(number)
    return Front(
        tuple(n for n in best if n in clear),
        tuple(n for n in best if n not in clear),
    )


def dominates(a: Values, b: Values) -> bool:
    """Whether `a` is at least as low as `b` in every objective and lower in one."""
    return all(a[k] <= b[k] for k in b) and any(a[k] < b[k] for k in b)


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


def _beats_but_for_noise(a: Values, b: Values) -> bool:
    """Whether `b` has nothing before `a` but a time that is not shorter beyond noise."""
    if _TIME not in b or a[_TIME] * (1 - QUICKER_BY) >= b[_TIME]:
        return False
    return dominates(*({name: value for name, value in each.items() if name != _TIME} for each in (a, b)))


def _all_but_time(values: Values) -> tuple[float, ...]:
    return tuple(values[name] for name in sorted(values) if name != _TIME)
