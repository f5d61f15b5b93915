"""Parts of a job that are specs themselves: the batch, the checkpoints, and what to record during the run."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.divisors import divisors_text
from shardscope.spec.numbers import Count, CountOrZero


class Batch(Spec):
    """The global batch of one optimizer step, and the micro-batch of one forward pass."""

    _positional = "global_batch"
    _former_names: ClassVar = {"global_size": "global_batch", "micro_size": "micro_batch"}

    global_batch: Count = 64
    """Samples in one optimizer step over all ranks. 1 to 2147483647, divisible by the number of ranks."""
    micro_batch: Count | None = None
    """Samples in one forward pass on one rank; None uses the rank's whole share, or in a pipeline a size that suits the
    schedule. Must divide the rank's share."""

    def per_rank(self, num_ranks: int, *, among: str | None = None) -> int:
        """Samples per rank in one step.

        Args:
            num_ranks: Number of ranks that the batch is divided over.
            among: Description of those ranks for error messages; None if they are all ranks.

        Raises:
            SpecError: The global batch is not divisible by `num_ranks`.
        """
        share, rest = divmod(self.global_batch, num_ranks)
        if rest or not share:
            below, above = share * num_ranks, (share + 1) * num_ranks
            near = f"{below} or {above}" if below else f"{above}"
            raise SpecError(
                f"batch.global_batch={self.global_batch} does not divide over "
                f"{among or f'world_size={num_ranks}'}; use {near}"
            )
        return share

    def accumulation_steps(self, num_ranks: int, *, among: str | None = None) -> int:
        """Gradient-accumulation steps: micro-batches per rank in one step; the arguments are those of `per_rank`.

        Raises:
            SpecError: The micro-batch does not divide the rank's share.
        """
        share = self.per_rank(num_ranks, among=among)
        micro = self.micro_batch or share
        if share % micro:
            raise SpecError(
                f"batch.micro_batch={micro} does not divide the per-rank batch {share}; "
                f"use one of {divisors_text(share, near=micro)}"
            )
        return share // micro


class Checkpoint(Spec):
    """When to save checkpoints, and how many to keep."""

    _positional = "every"

    every: Count | None = None
    """Steps between two checkpoints; None saves none during training."""
    at_end: bool = False
    """Also save after the last step, and when the run is stopped."""
    keep: Count = 2
    """Checkpoints kept; older ones are deleted after a newer one is complete. At least 1."""


class Record(Spec):
    """How much of a run is recorded."""

    spans_first: CountOrZero = 100
    """Number of steps at the start whose compute and communication spans are all recorded."""
    spans_every: Count = 10
    """Steps between two recordings of spans after the first `spans_first` steps. Bytes, loss and times are recorded at
    every step."""
    parameters: bool = False
    """Write all parameters to ``parameters.npz`` after the last step, so that runs can be compared tensor by tensor."""
    memory_first: CountOrZero = 3
    """First step whose memory is measured by kind, counted from the start or from the resumed step. The default is the
    third step: by then the optimizer state exists, and DistributedDataParallel, which rebuilds its buckets in the
    second step, has its final buckets. A shorter run measures its last step; 0 leaves the first measurement to
    `memory_every`. Only measured steps are slower."""
    memory_every: Count | None = 50
    """Steps between two later measurements of memory by kind. None measures only once, at `memory_first`."""
    noise_scale: bool = False
    """Measure the gradient noise scale: each rank records the squared norms of its own gradients and of their mean,
    before compression and clipping. If gradients are compressed, this additionally sends a sketch of them."""
    noise_every: Count = 1
    """With `noise_scale`: steps between two measurements. At least 1."""

    layers_every: CountOrZero = 10
    """Steps between two records of per-layer values: trust ratios and norms of LAMB and LARS, and residuals of
    compression with error feedback. The first step is always recorded; 0 records none."""

    @model_validator(mode="after")
    def _noise_is_on(self) -> Self:
        if self.noise_every != 1 and not self.noise_scale:
            raise SpecError(
                f"record.noise_every={self.noise_every} has no effect without noise_scale=True; set it, or leave "
                "noise_every out"
            )
        return self

    def watches_layers(self, step: int, first_step: int) -> bool:
        """Whether per-layer values are recorded at `step`, in a run that begins with `first_step`."""
        return self.layers_every > 0 and (step == first_step or step % self.layers_every == 0)

    def measures_noise(self, step: int) -> bool:
        """Whether the gradient noise scale is measured at `step`."""
        return self.noise_scale and step % self.noise_every == 0

    def measures_memory(self, step: int, first_step: int, steps: int) -> bool:
        """Whether memory is broken down by kind at `step`, in a run from step `first_step` to step `steps`."""
        first = min(first_step + self.memory_first - 1, steps)
        if step <= first:
            return step == first
        return self.memory_every is not None and step % self.memory_every == 0

    def shows(self, step: int) -> bool:
        """Whether spans are recorded at `step`."""
        return step <= self.spans_first or step % self.spans_every == 0
