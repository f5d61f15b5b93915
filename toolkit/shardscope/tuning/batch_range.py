"""Which batches a study searches by default: powers of two around the critical one, or around the job's own."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardscope.errors import SpecError
from shardscope.spec import Job
from shardscope.spec._base import Spec
from shardscope.spec.space import PowersOfTwo
from shardscope.tuning.apply import apply

_FACTOR = 4
_FEWEST_STEPS = 8
_MOST_TIMES = 8
"""A trial of equal samples takes more steps the smaller its batch; each takes fewer than this many times the job's."""


class BatchRange(Spec):
    """What a study's batches were centred on when it was begun."""

    own: int
    """The job's batch, which lies within them; it is one of them if it is a power of two."""
    critical: float | None = None
    """The critical batch size by the gradient noise scale, in samples; None where it was not measured."""
    low: float | None = None
    """Where its 95 % interval begins."""
    high: float | None = None
    """Where it ends; None where the gradient cannot be told from noise."""
    steps: int = 0
    """At which it was measured."""
    run: str | None = None
    """Path of the run that measured it, on the machine that did."""
    why_not: str | None = None
    """Why it was not measured; a clause. None also where it was not asked for."""

    def sentence(self, batches: PowersOfTwo) -> str:
        """Which batches are searched, and why those."""
        said = f"Batches of {batches.low} to {batches.high}"
        if self.critical is None or self.low is None:
            return f"{said}, around the job's own of {self.own}{f', because {self.why_not}' if self.why_not else ''}."
        is_inside = batches.low <= self.critical <= batches.high
        where = "around" if is_inside else "as near as can be to"
        end = "any number" if self.high is None else f"{self.high:.3g}"
        return (
            f"{said}, {where} the critical batch of {self.critical:.3g} samples ({self.low:.3g} to {end}) by the "
            f"gradient noise scale of {self.steps} steps."
        )


def around(
    job: Job, centre: float | None = None, *, fits: Callable[[Job], bool] | None = None
) -> PowersOfTwo | None:
    """Powers of two from a quarter to four times a centre, and on to the job's own batch; None where fewer than two go.

    Args:
        job: Its ranks must be able to share them, and its samples last for a few steps, not for many times its own.
        centre: In samples; None is the job's own batch.
        fits: Whether a job with another batch can be run here.
    """
    own = job.batch.global_batch
    middle = own if centre is None else 2 ** round(math.log2(centre))
    first = min(math.ceil(math.log2(middle / _FACTOR)), math.floor(math.log2(own)))
    last = max(math.floor(math.log2(middle * _FACTOR)), math.ceil(math.log2(own)))
    batches = [2**exponent for exponent in range(max(0, first), last + 1)]
    possible = [batch for batch in batches if _can_be(job, batch, fits)]
    if len(possible) < 2:
        return None if centre is None else around(job, fits=fits)
    return PowersOfTwo(possible[0], possible[-1])


def _can_be(job: Job, batch: int, fits: Callable[[Job], bool] | None) -> bool:
    own = job.batch.global_batch
    if batch * _MOST_TIMES < own or (batch > own and job.steps * own / batch < _FEWEST_STEPS):
        return False
    try:
        other = apply(job, {"batch": batch})
    except SpecError:
        return False
    return batch <= own or fits is None or fits(other)
