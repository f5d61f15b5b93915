"""Deep Gradient Compression: top-k with the momentum that it missed (Lin et al. 2018, arXiv:1712.01887)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.methods.compressors.packed import Exchange, PackedCompression, Ratio
from shardscope.spec.look import Look
from shardscope.spec.numbers import CountOrZero

if TYPE_CHECKING:
    from shardscope.spec.job import Job

_WARM_RATIO = 0.25
"""The ratio that a warm-up starts with (section 3.3)."""


class DeepGradientCompression(PackedCompression):
    """Momentum is kept on each rank; what is left out comes later, with its momentum."""

    name = "dgc"
    carriage = "steps"
    family = "Some of the elements"
    look = Look("#a35a3a", "dashdot", "diamond-tall")

    ratio: Ratio = 0.001
    """Share of the elements that is sent, 0 < value <= 1."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum kept on each rank, in place of the optimizer's, 0 <= value < 1; 0 is plain error feedback."""
    clip: float | Literal["off"] = "off"
    """The norm at which each rank's own gradient is clipped, divided by the root of the number of ranks; above 0."""
    warmup_steps: CountOrZero = 0
    """Steps in which the ratio falls from 0.25 to its own."""
    exchange: Exchange = "gather"
    """How packets meet: ``two-phase`` or ``gather``."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if isinstance(self.clip, float) and self.clip <= 0:
            raise SpecError(f"compression.clip={self.clip:g} is not above 0; use 2.5, or 'off'")
        return self

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import placed_bytes

        return placed_bytes(num_elements, self.ratio)

    @property
    def remembers(self) -> bool:
        return True

    @property
    def memories(self) -> int:
        """What has not been sent, and its momentum."""
        return 2 if self.momentum else 1

    def at_step(self, step: int) -> DeepGradientCompression:
        """The ratio falls by equal factors as in section 3.3, a step at a time instead of an epoch."""
        if step > self.warmup_steps or self.ratio >= _WARM_RATIO:
            return self
        left = 1 - (step - 1) / self.warmup_steps
        return self.replace(ratio=self.ratio * (_WARM_RATIO / self.ratio) ** left)

    def check_optimizer(self, job: Job) -> None:
        """It keeps the momentum itself: a second one would be applied to what it sends."""
        if not self.momentum:
            return
        settings = job.optimizer.settings
        betas = settings.get("betas", (0.0, 0.0))
        field, value = ("betas[0]", betas[0]) if betas[0] else ("momentum", settings.get("momentum", 0.0))
        if value:
            raise SpecError(
                f"optimizer.{field}={value:g} would come on top of compression.momentum={self.momentum:g}; use "
                "optimizer='sgd' without momentum, or compression.momentum=0"
            )

    def codec(self) -> Any:
        from shardscope.methods.compressors.topk._torch import WarmingTopK

        return WarmingTopK(self)

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.dgc._torch import MomentumCorrection, local_max_norm
        from shardscope.training.compression.memory import ErrorFeedback
        from shardscope.training.compression.packed import Packed

        memory = MomentumCorrection(self.momentum, local_max_norm(self.clip, job.num_data_ranks))
        shares = None if self.meets == "gather" else ErrorFeedback("share")
        return Packed(self.name, self.codec(), memory=memory, shares=shares, exchange=self.exchange)
