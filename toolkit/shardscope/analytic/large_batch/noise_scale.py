"""The gradient noise scale of a run, as an estimate of the critical batch size at each measured step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardscope.analytic.large_batch.noise import track

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.spec import Job

SMOOTHING = 0.99
Values = tuple[float, ...]


@dataclass(frozen=True)
class NoiseScale:
    """Critical batch size at each measured step of a run; empty until a step has been measured.

    Up to about the critical batch size, doubling the batch halves the number of steps needed; far above it, a larger
    batch saves almost no steps. The estimate gives the order of magnitude only: it is the simple noise scale of
    McCandlish et al. 2018 (arXiv 1812.06162), which ignores curvature.

    Attributes:
        batch: The run's global batch size, in samples.
        small_batch: Number of samples in each small batch, whose gradient was compared with the mean gradient.
        smoothing: Decay factor of the moving averages.
        steps: Measured steps, by number; all following attributes have one value per measured step.
        gradient_square: Moving average of the squared norm of the gradient over all data.
        trace: Moving average of the trace of a single sample's gradient covariance.
        critical_batch: Ratio of `trace` to `gradient_square`, in samples; infinite if no gradient signal is detectable.
        low: Lower end of the 95 % confidence interval of the critical batch size, in samples.
        high: Upper end of the interval, in samples; infinite if the gradient is indistinguishable from noise.
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
        """Critical batch size at the last measured step, in samples; None until a step has been measured."""
        return self.critical_batch[-1] if self.steps else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of `latest`, in samples; None until a step has been measured."""
        return (self.low[-1], self.high[-1]) if self.steps else None

    @property
    def frame(self) -> pd.DataFrame:
        """One row per measured step: step, gradient_square, trace, critical_batch, low, high."""
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


def batches_compared(job: Job) -> tuple[int, int]:
    """Return the sizes of the two batches whose gradients a run compares: a rank's micro-batch and the global batch."""
    share = job.batch.per_rank(job.num_data_ranks)
    return share // job.num_micro_batches, job.batch.global_batch


def noise_scale_from(
    measured: Mapping[int, tuple[float, float]], small_batch: int, batch: int, *, smoothing: float = SMOOTHING
) -> NoiseScale:
    """Return the noise scale computed from measured gradient norms.

    Args:
        measured: For each step, in order, the squared norms of a small batch's gradient and of the mean gradient.
        small_batch: Number of samples in a small batch.
        batch: Number of samples in the global batch.
        smoothing: Decay factor of the moving averages, between 0 and 1 (exclusive).

    Raises:
        SpecError: `smoothing` is out of range.
    """
    small, large = (np.array([squares[index] for squares in measured.values()]) for index in (0, 1))
    found = track(small, large, small_batch=small_batch, large_batch=batch, smoothing=smoothing)
    columns = (found.gradient_square, found.trace, found.critical_batch, found.low, found.high)
    return NoiseScale(batch, small_batch, smoothing, tuple(measured), *(tuple(c.tolist()) for c in columns))
