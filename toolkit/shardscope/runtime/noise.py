"""The gradient noise scale of a run: what its ranks measured, averaged over ranks and steps, as batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.analytic.large_batch import track
from shardscope.errors import SpecError
from shardscope.runtime.summary import number, steps_of

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.runtime.run import Run
    from shardscope.spec import Job

Squares = tuple[float, float]
"""Of the norms of a step's gradients: of the small batches' (mean), and of their mean."""
SMOOTHING = 0.99
Values = tuple[float, ...]


@dataclass(frozen=True)
class NoiseScale:
    """The critical batch size over a run's steps; empty as long as no step has been measured.

    Up to about this many samples a larger batch saves steps in proportion; far beyond it, it saves none. It is an order
    of magnitude: the simple noise scale of McCandlish et al. 2018 (arXiv 1812.06162), which leaves curvature out.

    Attributes:
        batch: The run's global batch size, in samples.
        small_batch: Samples in each of the gradients that were compared with the mean of all.
        smoothing: Of the moving averages.
        steps: Those that were measured.
        gradient_square: Squared norm of the gradient over all data, a moving average.
        trace: Of the covariance of a single sample's gradient, a moving average.
        critical_batch: Their ratio, in samples; infinite where the gradient cannot be made out at all.
        low: Where the 95 % interval of the critical batch size begins.
        high: Where it ends; infinite where the gradient cannot be told from noise.
    """

    batch: int
    small_batch: int
    smoothing: float
    steps: tuple[int, ...]
    gradient_square: Values
    trace: Values
    critical_batch: Values
    low: Values
    high: Values

    @property
    def latest(self) -> float | None:
        """The critical batch size at the last step, in samples; None before there is one."""
        return self.critical_batch[-1] if self.steps else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of `latest`, in samples; None before there is one."""
        return (self.low[-1], self.high[-1]) if self.steps else None

    @property
    def frame(self) -> pd.DataFrame:
        """One row a measured step: step, gradient_square, trace, critical_batch, low, high."""
        import pandas as pd

        columns = ("step", "gradient_square", "trace", "critical_batch", "low", "high")
        values = (self.steps, self.gradient_square, self.trace, self.critical_batch, self.low, self.high)
        return pd.DataFrame(dict(zip(columns, values, strict=True)))

    def __repr__(self) -> str:
        if not self.steps:
            return "<NoiseScale: no step has been measured yet>"
        return (
            f"<NoiseScale: critical batch {self.latest:.4g} ({self.low[-1]:.4g} to {self.high[-1]:.4g}) at step "
            f"{self.steps[-1]}, batch in use {self.batch}>"
        )


def noise_scale_of(run: Run, smoothing: float) -> NoiseScale:
    """What `Run.noise_scale` gives.

    Raises:
        SpecError: The run does not measure it, or `smoothing` is out of range.
    """
    job = run.job
    if not job.record.noise_scale:
        raise SpecError(
            f"run {run.id} does not measure its noise scale; launch it with record=Record(noise_scale=True)"
        )
    found = {step: squares_of(rows) for step, rows in steps_of(run.events()).items()}
    measured = {step: squares for step, squares in found.items() if squares is not None}
    return noise_scale_from(measured, *batches_compared(job), smoothing=smoothing)


def squares_of(rows: Sequence[Mapping[str, Any]]) -> Squares | None:
    """What the step events of all ranks tell of one step; None if it was not measured."""
    if not rows or not all("noise" in row for row in rows):
        return None
    return _mean(rows, "small_square"), _mean(rows, "large_square")


def _mean(rows: Sequence[Mapping[str, Any]], of: str) -> float:
    return sum(number(row["noise"][of]) for row in rows) / len(rows)


def batches_compared(job: Job) -> tuple[int, int]:
    """Samples in a small batch and in all of a step."""
    share = job.batch.per_rank(job.num_data_ranks)
    return share // job.num_micro_batches, job.batch.global_batch


def noise_scale_from(
    measured: Mapping[int, Squares], small_batch: int, batch: int, *, smoothing: float = SMOOTHING
) -> NoiseScale:
    """The noise scale by what steps told, in their order.

    Raises:
        SpecError: `smoothing` is out of range.
    """
    small, large = (np.array([squares[index] for squares in measured.values()]) for index in (0, 1))
    found = track(small, large, small_batch=small_batch, large_batch=batch, smoothing=smoothing)
    columns = (found.gradient_square, found.trace, found.critical_batch, found.low, found.high)
    return NoiseScale(batch, small_batch, smoothing, tuple(measured), *(tuple(c.tolist()) for c in columns))
