"""Default batch sizes of a study: powers of two around the critical batch size, or around the job's own."""

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
"""Most steps of a trial with equal samples, as a multiple of the job's; smaller batches take more steps."""


class BatchRange(Spec):
    """Centre of a study's batch sizes, fixed when the study is created."""

    own: int
    """The job's batch size. It lies within the range, and is one of the batches if it is a power of two."""
    critical: float | None = None
    """Critical batch size by the gradient noise scale, in samples; None if not measured."""
    low: float | None = None
    """Lower end of its 95 % interval, in samples."""
    high: float | None = None
    """Upper end; None if the gradient cannot be distinguished from noise."""
    steps: int = 0
    """Number of steps over which it was measured."""
    run: str | None = None
    """Path of the run that measured it, on the machine that ran it."""
    why_not: str | None = None
    """Clause on why it was not measured; None also if it was not requested."""

    def sentence(self, batches: PowersOfTwo) -> str:
        """Return a sentence on which batch sizes are searched, and why."""
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
    """Return powers of two from a quarter to four times a centre, extended to the job's own batch.

    None if fewer than two of them are possible, also around the job's own batch.

    Args:
        job: The job. Batches must be valid for it and take at most 8 times its steps; those larger than its own must
            leave at least 8 steps.
        centre: Centre in samples; None is the job's own batch size.
        fits: Returns whether a job with a larger batch can run here.
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
