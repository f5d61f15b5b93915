"""PowerSGD: low-rank factors of each matrix by one step of power iteration (Vogels et al. 2019, arXiv:1905.13727)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from shardscope.methods.compressors.low_rank import LowRankCompression
from shardscope.spec.look import MethodStyle

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class PowerSgd(LowRankCompression):
    """Sends two low-rank factors of each gradient matrix, with the same rank for all matrices."""

    name = "powersgd"
    look = MethodStyle("#11997a", "solid", "star")
    codec_passes = 2.0  # one product per factor

    rank: int = Field(default=4, ge=1, le=256)
    """Rank of the approximation of each matrix, 1 to 256."""

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.powersgd._torch import PowerSgdCompressor

        return PowerSgdCompressor(
            self.rank, feedback=self.feedback, seed=job.seed, warmup_steps=self.warmup_steps
        )
