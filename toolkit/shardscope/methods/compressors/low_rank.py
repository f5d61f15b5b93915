"""Base class of methods that approximate each matrix by two thin factors (Vogels et al. 2019, arXiv:1905.13727)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardscope.spec.compression import Collective, Compression, Shapes
from shardscope.spec.numbers import CountOrZero


class LowRankCompression(Compression):
    """Base class of low-rank methods, which all-reduce two factors one after the other."""

    carriage = "layers"
    family = "Low rank"

    rank: int
    feedback: bool = True
    """Error feedback: add the compression error of a step to the next step's gradient."""
    warmup_steps: CountOrZero = 0
    """Number of uncompressed steps at the start."""

    def uncompressed(self, steps: int) -> int:
        return self.warmup_steps

    def at_step(self, step: int) -> Compression:
        """Return ``none`` during the warm-up, then this method."""
        uncompressed: Compression = Compression.by_name("none")
        return uncompressed if step <= self.warmup_steps else self

    def probes(self, plan: Sequence[int] | None) -> int:
        """Number of random probe vectors sent with every left factor."""
        return 0

    def kept_bytes(self, shapes: Shapes, world_size: int, *, scatters: bool = False) -> int | None:
        """Return the bytes of the right factors kept for the next step, plus those of the bucket's residual."""
        from shardscope.analytic.communication.compressed import FLOAT_BYTES, low_rank_elements

        if not self.is_fixed:
            return None
        _, factors = low_rank_elements(shapes, [self.rank] * len(shapes))
        return FLOAT_BYTES * (factors + self.feedback * sum(prod(shape) for shape in shapes))

    def collectives(
        self, shapes: Shapes, world_size: int, *, plan: Sequence[int] | None = None
    ) -> Sequence[Collective]:
        """Return two sums in sequence, since the second factor depends on the summed first factor."""
        from shardscope.analytic.communication.compressed import FLOAT_BYTES, low_rank_elements

        ranks = [self.rank] * len(shapes) if plan is None else plan
        messages = low_rank_elements(shapes, ranks, probes=self.probes(plan))
        return [Collective("sum", count, FLOAT_BYTES) for count in messages]
