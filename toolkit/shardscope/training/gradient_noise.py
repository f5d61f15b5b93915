"""Measurement of gradient noise: the squared norms of small batches' gradients and of their mean.

    noise = GradientNoise(job, context)
    noise.watch(named_parameters)     once: receives each gradient from the backward pass
    noise.begin(step)                 before the first backward pass
    noise.look_at(name, gradient)     for strategies that have gradients elsewhere
    noise.finish(gradients)           when the mean is ready, before it is unscaled and clipped

A small batch is a micro-batch. Its gradient is measured before it is accumulated, compressed or combined with the
residual of error feedback. Without compression, the mean over all micro-batches of all ranks is the result of the
collective on this rank. With compression the result is another vector. Then each rank adds its gradients to a sketch
(`sketch`), and the ranks sum their sketches, as traffic under a separate name. Each step draws another sketch, so that
its error averages out over steps as the noise of the gradients does.

McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1; `shardscope.analytic.large_batch` uses the two norms.
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
"""Name under which its traffic is counted; `shardscope.runlog.summary` leaves it out of a step's bytes."""


@dataclass(frozen=True)
class NoiseSample:
    """One rank's measurement at one step.

    Attributes:
        small_square: Squared norm of a micro-batch's gradient, the mean over this rank's micro-batches.
        large_square: Squared norm of the mean gradient over all micro-batches of all ranks.
        small_batch: Samples in a micro-batch.
        large_batch: Samples in the global batch.
    """

    small_square: float
    large_square: float
    small_batch: int
    large_batch: int

    def as_event(self) -> dict[str, float]:
        """The sample as a dictionary for events."""
        return asdict(self)


class GradientNoise:
    """One rank's side of measuring the gradient noise scale."""

    def __init__(self, job: Job, context: RankContext) -> None:
        self.job, self.context = job, context
        self.parts = job.num_micro_batches
        self.small_batch = job.batch.per_rank(job.num_data_ranks) // self.parts
        self.is_measuring = False

    def watch(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Measure, from here on, the gradients of these parameters in each backward pass, before accumulation."""
        for name, parameter in named:
            parameter.register_hook(self._looking_at(name))

    def _looking_at(self, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: self.look_at(name, gradient)

    def begin(self, step: int) -> None:
        """Start a step, and decide whether the noise is measured in it."""
        self.is_measuring = self.job.record.measures_noise(step)
        self._norms: list[Tensor] = []
        self._sketch = Sketch(self.context.device) if self._needs_sketch else None

    @property
    def _needs_sketch(self) -> bool:
        return self.is_measuring and self.job.compression.is_on

    def look_at(self, name: str, gradient: Tensor) -> None:
        """Measure one micro-batch's whole gradient of a tensor, still divided by the number of micro-batches."""
        if not self.is_measuring:
            return
        self._norms.append(torch.linalg.vector_norm(gradient))
        if self._sketch is not None:
            seed = zlib.crc32(f"{self.job.seed}/{self.context.meter.step}/{name}".encode())
            self._sketch.add(gradient, seed)

    def finish(
        self, gradients: Sequence[Tensor], *, loss_scale: float | None, copies: int | None
    ) -> NoiseSample | None:
        """Finish the measurement after the exchange; called by all ranks.

        Args:
            gradients: This rank's part of the mean; ignored where gradients are compressed.
            loss_scale: Factor that all gradients are still multiplied by; None for 1.
            copies: Number of ranks that hold each piece of the mean; None where all ranks hold all of it.

        Returns:
            The measurement; None if this step was not due for it, or if gradients overflowed.
        """
        if not self.is_measuring:
            return None
        self.is_measuring = False
        unscale = 1 / (loss_scale or 1.0) ** 2
        total = float(torch.stack(self._norms).double().square().sum())
        mean = self._sketched() if self._sketch is not None else self._held(gradients, copies)
        # each micro-batch's gradient was divided by their number, and the mean of the squares is wanted
        small, large = total * self.parts * unscale, mean * unscale
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
