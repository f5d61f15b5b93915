"""Default batch sizes of a study: powers of two around the critical batch size, or around the job's batch size."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardscope.errors import SpecError
from shardscope.spec import Job
from shardscope.spec._base import Spec
from shardscope.spec.space import PowersOfTwo
from shardscope.tuning.apply import apply, checked_rows

_FACTOR = 4
_FEWEST_STEPS = 8
_MOST_TIMES = 8
"""Maximum number of steps of a trial that trains on as many samples as the job, as a multiple of the job's steps."""


class BatchRange(Spec):
    """Record of how a study chose its range of batch sizes; fixed when the study is created."""

    own: int
    """The job's batch size. It lies within the range, and is one of the sizes searched if it is a power of two."""
    critical: float | None = None
    """Critical batch size from the gradient noise scale, in samples; None if not measured."""
    low: float | None = None
    """Lower end of the 95 % confidence interval of `critical`, in samples."""
    high: float | None = None
    """Upper end of the interval, in samples; None if infinite, as when the gradient may be pure noise."""
    steps: int = 0
    """Number of steps over which `critical` was measured."""
    run: str | None = None
    """Path of the run that measured `critical`, on the machine where it ran."""
    why_not: str | None = None
    """Reason why `critical` was not measured, as a clause; None if it was measured or no measurement was requested."""

    def sentence(self, batches: PowersOfTwo) -> str:
        """Return a sentence that states which batch sizes are searched and why."""
        said = f"Batch sizes {batches.low} to {batches.high}"
        if self.critical is None or self.low is None:
            return f"{said}, around the job's own {self.own}{f', because {self.why_not}' if self.why_not else ''}."
        is_inside = batches.low <= self.critical <= batches.high
        where = "around" if is_inside else "as close as possible to"
        end = "infinity" if self.high is None else f"{self.high:.3g}"
        return (
            f"{said}, {where} the critical batch size {self.critical:.3g} (95% interval: {self.low:.3g} to {end}), "
            f"from the gradient noise scale of {self.steps} steps."
        )


def around(
    job: Job, centre: float | None = None, *, fits: Callable[[Job], bool] | None = None
) -> PowersOfTwo | None:
    """Return the powers of two from a quarter to four times `centre`, extended to include the job's batch size.

    If fewer than two of these sizes are possible, try the range around the job's batch size; return None if that also
    fails.

    Args:
        job: Job whose batch size varies. A size is possible if it is valid for the job and takes at most 8 times the
            job's steps; sizes above the job's own must also take at least 8 steps.
        centre: Centre of the range, in samples; None uses the job's batch size.
        fits: Function that returns whether a job with a larger batch fits on this machine; None accepts every job.
    """
    own = job.batch.global_batch
    middle = own if centre is None else 2 ** round(math.log2(centre))
    first = min(math.ceil(math.log2(middle / _FACTOR)), math.floor(math.log2(own)))
    last = max(math.floor(math.log2(middle * _FACTOR)), math.ceil(math.log2(own)))
    batches = [2**exponent for exponent in range(max(0, first), last + 1)]
    possible = [batch for batch in batches if _is_possible(job, batch, fits)]
    if len(possible) < 2:
        return None if centre is None else around(job, fits=fits)
    return PowersOfTwo(possible[0], possible[-1])


def _is_possible(job: Job, batch: int, fits: Callable[[Job], bool] | None) -> bool:
    own = job.batch.global_batch
    if batch * _MOST_TIMES < own or (batch > own and job.steps * own / batch < _FEWEST_STEPS):
        return False
    try:
        other = checked_rows(apply(job, {"batch": batch}))
    except SpecError:
        return False
    return batch <= own or fits is None or fits(other)
