"""Base class of 1-bit Adam and 1-bit LAMB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from shardscope.errors import SpecError
from shardscope.methods.compressors.packed import BlockCompression
from shardscope.spec.numbers import CountOrZero

if TYPE_CHECKING:
    from shardscope.spec.job import Job

USEFUL_WARMUP = 5
"""Minimum number of warm-up steps. On digits (100 steps, 2 ranks, 3 seeds each), the final test loss was 3 to 11 times
that of the uncompressed run with 1 warm-up step, up to 2 times with 2 or 3, and up to 1.5 times with 5 or 10."""


class OneBitCompression(BlockCompression):
    """Base class of methods that send signs of first moments, with one magnitude per block, after a warm-up."""

    carriage = "steps"
    family = "Signs"
    is_fixed = False
    least_warmup = USEFUL_WARMUP
    optimizer: ClassVar[str]
    """Name of the optimizer that the method requires."""

    warmup_steps: CountOrZero | None = None
    """Number of steps at the start without compression; None means 20 % of the job's steps, but at least 5."""
    block: int = Field(default=1024, ge=8, le=65536)
    """Number of elements that share one magnitude: a multiple of 8, from 8 to 65536."""

    @property
    def memories(self) -> int:
        """Number of values stored per element: 2, the residual and the scale of the tensor."""
        return 2

    @property
    def width(self) -> int:
        return 1

    @property
    def remembers(self) -> bool:
        return True

    @property
    def steps_are_alike(self) -> bool:
        """Whether all steps are alike: False, because a resumed run may have completed its warm-up earlier."""
        return False

    def uncompressed(self, steps: int) -> int:
        return max(-(-steps // 5), USEFUL_WARMUP) if self.warmup_steps is None else self.warmup_steps

    def check_follows(self, before: str) -> None:
        if before != self.name:
            raise SpecError(
                f"compression={self.name!r} cannot resume a run that was trained with {before!r}, because it needs "
                "the state from its own warm-up; use it from the first step, or resume with another method"
            )

    def check_optimizer(self, job: Job) -> None:
        if job.optimizer.name != self.optimizer:
            raise SpecError(
                f"compression={self.name!r} cannot be combined with optimizer={job.optimizer.name!r}; use "
                f"optimizer={self.optimizer!r}"
            )
        if job.clip_norm is not None:
            raise SpecError(
                f"clip_norm={job.clip_norm:g} cannot be combined with compression={self.name!r}, which exchanges "
                "momenta instead of gradients; leave clip_norm out"
            )
        clipped = job.optimizer.settings.get("max_grad_norm", "off")
        if clipped != "off":
            raise SpecError(
                f"optimizer.max_grad_norm={clipped:g} cannot be combined with compression={self.name!r}, which "
                "exchanges momenta instead of gradients; use max_grad_norm='off'"
            )
        self._check_warmup(job.steps)

    def _check_warmup(self, steps: int) -> None:
        if steps <= USEFUL_WARMUP:
            raise SpecError(
                f"steps={steps} is too few for compression={self.name!r}, which starts to compress after at least "
                f"{USEFUL_WARMUP} warm-up steps; use steps={USEFUL_WARMUP + 1} or more"
            )
        warmup = self.uncompressed(steps)
        if not USEFUL_WARMUP <= warmup < steps:
            why = (
                "no step to compress" if warmup >= steps else "too few gradients to estimate a second moment"
            )
            raise SpecError(
                f"compression.warmup_steps={warmup} with steps={steps} leaves {self.name} {why}; "
                f"use {USEFUL_WARMUP} to {steps - 1}"
            )

    def codec(self) -> Any:
        from shardscope.methods.compressors.sign._torch import BlockSign

        return BlockSign(self.block)

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.onebit_adam._torch import OneBit

        return OneBit(self.name, self.codec(), self.uncompressed(job.steps))
