"""PowerSGD with a separate rank for each layer, as low as an error bound allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from shardscope.methods.compressors.low_rank import LowRankCompression
from shardscope.spec.compression import Collective, Shapes
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import Count

if TYPE_CHECKING:
    from shardscope.spec.job import Job

PROBES = 8
"""Number of random probe vectors used to estimate the error of low-rank factors, in steps that measure this error."""


class AdaptiveRank(LowRankCompression):
    """Sends low-rank factors, with the lowest rank for each matrix that keeps its error within a bound.

    Errors are estimated as in Halko, Martinsson and Tropp 2011, section 4.3.
    """

    name = "adaptive-rank"
    look = MethodStyle("#11997a", "dash", "star-open")
    is_fixed = False

    error: float = Field(default=0.3, gt=0, lt=1)
    """Bound on the relative error of each matrix's approximation, 0 < value < 1; exceeded if even `rank` is too low."""
    rank: int = Field(default=8, ge=1, le=256)
    """Largest rank of an approximation, 1 to 256."""
    update_every: Count = 20
    """Number of steps between measurements of the gradients; each measurement updates the ranks."""

    def probes(self, plan: Sequence[int] | None) -> int:
        """Return the number of probe vectors: `PROBES` in steps that measure the error (no `plan`), otherwise 0."""
        return PROBES if plan is None else 0

    def bounds(
        self, shapes: Shapes, world_size: int, step: int
    ) -> tuple[Sequence[Collective], Sequence[Collective]] | None:
        """Return the collectives at rank 1 and at the largest rank, as bounds; None in steps that measure the error.

        Such steps always send the largest rank and the probes, so their collectives are known exactly.
        """
        if step == self.warmup_steps + 1 or (step - 1) % self.update_every == 0:
            return None
        least, most = ([rank] * len(shapes) for rank in (1, self.rank))
        return (
            self.collectives(shapes, world_size, plan=least),
            self.collectives(shapes, world_size, plan=most),
        )

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.adaptive_rank._torch import AdaptiveRankCompressor

        return AdaptiveRankCompressor(
            self.rank, self.error, self.update_every, feedback=self.feedback, seed=job.seed,
            warmup_steps=self.warmup_steps,
        )  # fmt: skip
