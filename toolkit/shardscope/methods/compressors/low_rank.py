"""What methods share that approximate each matrix by two thin factors (Vogels et al. 2019, arXiv:1905.13727)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardscope.spec.compression import Collective, Compression, Shapes
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

    def kept_bytes(self, shapes: Shapes, world_size: int, *, scatters: bool = False) -> int | None:
        """The second factors, from which the next step goes on; and what is left of the bucket."""
        from shardscope.analytic.communication.compressed import FLOAT_BYTES, low_rank_elements

        if not self.is_fixed:
            return None
        _, factors = low_rank_elements(shapes, [self.rank] * len(shapes))
        return FLOAT_BYTES * (factors + self.feedback * sum(prod(shape) for shape in shapes))

    def collectives(
        self, shapes: Shapes, world_size: int, *, plan: Sequence[int] | None = None
    ) -> Sequence[Collective]:
        """Two sums: the second factor needs that of the first."""
        from shardscope.analytic.communication.compressed import FLOAT_BYTES, low_rank_elements

        ranks = [self.rank] * len(shapes) if plan is None else plan
        messages = low_rank_elements(shapes, ranks, probes=self.probes(plan))
        return [Collective("sum", count, FLOAT_BYTES) for count in messages]
