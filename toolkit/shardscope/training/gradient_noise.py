"""Gradient noise measurement: squared norms of micro-batch gradients, and of their mean over the global batch.

    noise = GradientNoise(job, context)
    noise.watch(named_parameters)     once: registers hooks that measure each gradient in the backward pass
    noise.begin(step)                 before the first backward pass
    noise.measure(name, gradient)     for strategies whose gradients do not pass through these hooks
    noise.finish(gradients)           when the mean gradient is ready, before it is unscaled and clipped

The gradient of a micro-batch is measured before it is accumulated, compressed or added to an error-feedback
residual. Without compression, the strategy's collective gives the mean gradient over all micro-batches of all
ranks. With compression it gives only an approximation. In that case each rank adds its gradients to a sketch,
whose norm estimates the norm of the gradients (see `sketch`), and the ranks sum their sketches; this traffic
is recorded under a separate name. Each step draws a new random sketch, so that sketching errors average out
over steps, as gradient noise does.

The method follows McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1. `shardscope.analytic.large_batch`
computes the noise scale from the two norms.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from shardscope.spec import Job
from shardscope.training.context import RankContext
from shardscope.training.sharding import sum_of_squares
from shardscope.training.sketch import Sketch

TRAFFIC = "noise_scale"
"""Name under which traffic of the measurement is recorded; `shardscope.runlog.summary` excludes it from a step's
bytes."""


@dataclass(frozen=True)
class NoiseSample:
    """One rank's measurement in one step.

    Attributes:
        small_square: Mean, over this rank's micro-batches, of the squared norm of a micro-batch's gradient.
        large_square: Squared norm of the mean gradient over all micro-batches of all ranks.
        small_batch: Number of samples in a micro-batch.
        large_batch: Number of samples in the global batch.
    """

    small_square: float
    large_square: float
    small_batch: int
    large_batch: int

    def as_event(self) -> dict[str, float]:
        """Return the sample as a dictionary for the event log."""
        return asdict(self)


class GradientNoise:
    """Measures, on one rank, the gradient norms needed to compute the gradient noise scale.

    Args:
        job: The job being trained.
        context: This rank's context.
    """

    def __init__(self, job: Job, context: RankContext) -> None:
        self.job, self.context = job, context
        self.parts = job.num_micro_batches
        self.small_batch = job.batch.per_rank(job.num_data_ranks) // self.parts
        self.is_measuring = False
        self.part_weight = 1.0
        """Weight of the current micro-batch in the mean gradient, relative to equal weights; see `loss_weights`."""

    def watch(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Register hooks that measure the gradients of these parameters in each backward pass, before accumulation."""
        for name, parameter in named:
            parameter.register_hook(self._hook_for(name))

    def _hook_for(self, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: self.measure(name, gradient)

    def begin(self, step: int) -> None:
        """Start a step, and decide by the job's `Record` whether to measure gradient noise in it."""
        self.is_measuring = self.job.record.measures_noise(step)
        self._norms: list[Tensor] = []
        self._parts_measured = 0
        self._sketch = Sketch(self.context.device) if self._needs_sketch else None

    def begin_part(self, weight: float) -> None:
        """Start the backward pass of a micro-batch with this `part_weight`; if it is 0, there is no gradient."""
        self.part_weight = weight
        self._parts_measured += weight != 0

    @property
    def _needs_sketch(self) -> bool:
        return self.is_measuring and self.job.compression.is_on

    def measure(self, name: str, gradient: Tensor) -> None:
        """Measure the gradient of one parameter for one micro-batch, if this step is measured.

        Args:
            name: Name of the parameter.
            gradient: The whole gradient, divided by the number of micro-batches as in the backward pass, and multiplied
                by `part_weight`.
        """
        if not self.is_measuring:
            return
        if self.part_weight:
            norm = torch.linalg.vector_norm(gradient)
            self._norms.append(norm if self.part_weight == 1 else norm / self.part_weight)
        if self._sketch is not None:
            seed = zlib.crc32(f"{self.job.seed}/{self.context.meter.step}/{name}".encode())
            self._sketch.add(gradient, seed)

    def finish(
        self, gradients: Sequence[Tensor], *, loss_scale: float | None, copies: int | None
    ) -> NoiseSample | None:
        """Complete the measurement after the gradients have been reduced. All ranks must call this together.

        Args:
            gradients: This rank's part of the mean gradient; ignored if gradients are compressed.
            loss_scale: Factor by which all gradients are still multiplied; None if they are not scaled.
            copies: Number of ranks that have each piece of the mean gradient; None if every rank has all of it.

        Returns:
            The measurement; None if this step is not measured, if gradients overflowed, or if none of this rank's
            targets counts.
        """
        if not self.is_measuring:
            return None
        self.is_measuring = False
        unscale = 1 / (loss_scale or 1.0) ** 2
        total = float(torch.stack(self._norms).double().square().sum()) if self._norms else 0.0
        mean = self._sketched() if self._sketch is not None else self._held(gradients, copies)
        # each of the m measured gradients was divided by n, so the mean of their squared norms is total / m * n**2
        if not self._parts_measured:
            return None
        small, large = total * self.parts**2 / self._parts_measured * unscale, mean * unscale
        if not (isfinite(small) and isfinite(large)):
            return None
        return NoiseSample(small, large, self.small_batch, self.job.batch.global_batch)

    def _sketched(self) -> float:
        group = self.context.group
        assert self._sketch is not None
        assert group is not None  # only gradients of several ranks are compressed
        mean = group.sum_as(TRAFFIC, self._sketch.buckets).div_(self.job.num_data_ranks)
        return float(mean.double().square().sum())

    def _held(self, gradients: Sequence[Tensor], copies: int | None) -> float:
        square = sum_of_squares(gradients).to(self.context.device)
        if copies is None:
            return float(square)
        group = self.context.group
        assert group is not None
        return float(group.sum_as(TRAFFIC, square)) / copies
