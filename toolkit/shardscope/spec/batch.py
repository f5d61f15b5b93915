"""The batch of a job: global, per rank, and per forward pass."""

from __future__ import annotations

from typing import ClassVar

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.divisors import divisors_text
from shardscope.spec.numbers import Count


class Batch(Spec):
    """The global batch of one optimizer step, and the micro-batch that one forward pass takes."""

    _positional = "global_batch"
    _former_names: ClassVar = {"global_size": "global_batch", "micro_size": "micro_batch"}

    global_batch: Count = 64
    """Samples in one optimizer step over all ranks. 1 to 2147483647, divisible by the number of ranks."""
    micro_batch: Count | None = None
    """Samples in one forward pass on one rank; None takes the rank's whole share at once, or in a pipeline a size that
    suits its schedule. Divides the rank's share."""

    def per_rank(self, num_ranks: int, *, among: str | None = None) -> int:
        """Samples per rank in one step.

        Args:
            num_ranks: Number of ranks that the batch is divided over.
            among: Description of those ranks for error messages; None if they are all ranks.

        Raises:
            SpecError: The global batch does not divide evenly.
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
