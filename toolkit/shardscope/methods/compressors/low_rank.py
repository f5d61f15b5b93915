"""What methods share that approximate each matrix by two thin factors (Vogels et al. 2019, arXiv:1905.13727)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.compression import Compression, Shapes
from shardscope.spec.numbers import CountOrZero


class LowRankCompression(Compression):
    """Factors are added up on the way, one message after the other."""

    carriage = "layers"
    family = "Low rank"

    rank: int
    feedback: bool = True
    """Error feedback: what a step leaves out is added to the next step's gradient."""
    warmup_steps: CountOrZero = 0
    """Uncompressed steps at the start."""

    def uncompressed(self, steps: int) -> int:
        return self.warmup_steps

    def at_step(self, step: int) -> Compression:
        """``none`` while it warms up."""
        uncompressed: Compression = Compression.by_name("none")
        return uncompressed if step <= self.warmup_steps else self

    def probes(self, plan: Sequence[int] | None) -> int:
        """Vectors that go with every left factor."""
        return 0

    def bucket_bytes(
        self, shapes: Shapes, world_size: int, *, directions: int = 1, plan: Sequence[int] | None = None
    ) -> Any:
        from shardscope.analytic.communication.compressed import low_rank_elements, summed_bytes

        ranks = [self.rank] * len(shapes) if plan is None else plan
        messages = low_rank_elements(shapes, ranks, probes=self.probes(plan))
        return summed_bytes(messages, world_size, directions=directions)

    def rounds(self, shapes: Shapes, world_size: int) -> int:
        """The second factor needs the sum of the first."""
        from shardscope.analytic.communication.compressed import low_rank_elements

        messages = low_rank_elements(shapes, [self.rank] * len(shapes))
        return 2 * (world_size - 1) * sum(map(bool, messages))
