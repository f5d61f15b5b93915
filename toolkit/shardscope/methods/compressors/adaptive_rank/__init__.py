"""PowerSGD whose rank moves by layer: as low as the error of each approximated matrix allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from shardscope.methods.compressors.low_rank import LowRankCompression
from shardscope.spec.compression import Collective, Shapes
from shardscope.spec.look import Look
from shardscope.spec.numbers import Count

if TYPE_CHECKING:
    from shardscope.spec.job import Job

PROBES = 8
"""Random directions along which it looks for what its factors miss, in the steps in which it looks."""


class AdaptiveRank(LowRankCompression):
    """Ranks follow a bound on the error (Halko, Martinsson and Tropp 2011, section 4.3)."""

    name = "adaptive-rank"
    look = Look("#11997a", "dash", "star-open")
    is_fixed = False

    error: float = Field(default=0.3, gt=0, lt=1)
    """Largest relative error of each approximated matrix, as far as `rank` allows, 0 < value < 1."""
    rank: int = Field(default=8, ge=1, le=256)
    """The largest rank, 1 to 256."""
    update_every: Count = 20
    """Steps between two looks at the gradients, after which ranks move."""

    def probes(self, plan: Sequence[int] | None) -> int:
        """It looks at the gradient in steps in which it has no plan, at its largest rank."""
        return PROBES if plan is None else 0

    def bounds(
        self, shapes: Shapes, world_size: int, step: int
    ) -> tuple[Sequence[Collective], Sequence[Collective]] | None:
        """One direction of each matrix to `rank`, but in steps that look, which send `rank` and probes."""
        if step == self.warmup_steps + 1 or (step - 1) % self.update_every == 0:
            return None
        least, most = ([rank] * len(shapes) for rank in (1, self.rank))
        return (
            self.collectives(shapes, world_size, plan=least),
            self.collectives(shapes, world_size, plan=most),
        )

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.adaptive_rank._torch import AdaptiveRank

        return AdaptiveRank(
            self.rank, self.error, self.update_every, feedback=self.feedback, seed=job.seed,
            warmup_steps=self.warmup_steps,
        )  # fmt: skip
