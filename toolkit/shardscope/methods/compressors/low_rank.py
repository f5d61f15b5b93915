"""Base class of methods that approximate each matrix by two thin factors (Vogels et al. 2019, arXiv:1905.13727)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardscope.spec.compression import Collective, Compression, Shapes
from shardscope.spec.numbers import CountOrZero


class LowRankCompression(Compression):
    """Base class of low-rank methods, which all-reduce the left and then the right factors of a bucket's matrices."""

    carriage = "layers"
    family = "Low rank"

    rank: int
    feedback: bool = True
    """Error feedback: add the compression error of a step to the next step's gradient."""
    warmup_steps: CountOrZero = 0
    """Number of steps at the start whose gradients are sent uncompressed."""

    def uncompressed(self, steps: int) -> int:
        return self.warmup_steps

    def at_step(self, step: int) -> Compression:
        """Return the method that is used in this step: ``none`` during the warm-up, then this method."""
        uncompressed: Compression = Compression.by_name("none")
        return uncompressed if step <= self.warmup_steps else self

    def probes(self, plan: Sequence[int] | None) -> int:
        """Return the number of random probe vectors whose products with a matrix are sent with its left factor."""
        return 0

    def kept_bytes(self, shapes: Shapes, world_size: int, *, scatters: bool = False) -> int | None:
        """Return the bytes of a bucket's right factors and residual; None if the ranks of its matrices are adaptive."""
        from shardscope.analytic.communication.compressed import FLOAT_BYTES, low_rank_elements

        if not self.is_fixed:
            return None
        _, factors = low_rank_elements(shapes, [self.rank] * len(shapes))
        return FLOAT_BYTES * (factors + self.feedback * sum(prod(shape) for shape in shapes))

    def collectives(
        self, shapes: Shapes, world_size: int, *, plan: Sequence[int] | None = None
    ) -> Sequence[Collective]:
        """Return the two all-reduces of a bucket in order: of the left factors, then of the right factors."""
        from shardscope.analytic.communication.compressed import FLOAT_BYTES, low_rank_elements

        ranks = [self.rank] * len(shapes) if plan is None else plan
        messages = low_rank_elements(shapes, ranks, probes=self.probes(plan))
        return [Collective("sum", count, FLOAT_BYTES) for count in messages]
