"""Deep Gradient Compression: top-k with momentum correction (Lin et al. 2018, arXiv:1712.01887)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.methods.compressors.packed import Exchange, PackedCompression, Ratio
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import CountOrZero

if TYPE_CHECKING:
    from shardscope.spec.job import Job

_WARM_RATIO = 0.25
"""Ratio in the first warm-up step (section 3.3)."""


class DeepGradientCompression(PackedCompression):
    """Top-k with momentum on each rank: an element that is sent late includes the momentum accumulated until then."""

    name = "dgc"
    carriage = "steps"
    family = "Sparsification"
    look = MethodStyle("#a35a3a", "dashdot", "diamond-tall")

    ratio: Ratio = 0.001
    """Fraction of the elements to send, 0 < value <= 1."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum applied on each rank, not in the optimizer, 0 <= value < 1; with 0, this is plain error feedback."""
    clip: float | Literal["off"] = "off"
    """Clipping norm, above 0, or ``off``. Each rank clips its own gradient at this norm divided by the square root of
    the number of ranks."""
    warmup_steps: CountOrZero = 0
    """Number of warm-up steps, during which the ratio falls from 0.25 to `ratio`."""
    exchange: Exchange = "gather"
    """How packets are exchanged: each rank averages a share of the elements (``two-phase``), or gets all packets
    (``gather``)."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if isinstance(self.clip, float) and self.clip <= 0:
            raise SpecError(f"compression.clip={self.clip:g} is not above 0; use for example 2.5, or 'off'")
        return self

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import placed_bytes

        return placed_bytes(num_elements, self.ratio)

    @property
    def remembers(self) -> bool:
        return True

    @property
    def memories(self) -> int:
        """Number of values stored per element: 2 (residual and momentum), or 1 without momentum."""
        return 2 if self.momentum else 1

    def at_step(self, step: int) -> DeepGradientCompression:
        """Return the method with the ratio for this step.

        During the warm-up, the ratio falls exponentially (as in section 3.3 of the paper, but per step, not per epoch).
        """
        if step > self.warmup_steps or self.ratio >= _WARM_RATIO:
            return self
        left = 1 - (step - 1) / self.warmup_steps
        return self.replace(ratio=self.ratio * (_WARM_RATIO / self.ratio) ** left)

    def check_optimizer(self, job: Job) -> None:
        """Reject an optimizer with momentum, because momentum would then be applied twice."""
        if not self.momentum:
            return
        settings = job.optimizer.settings
        betas = settings.get("betas", (0.0, 0.0))
        field, value = ("betas[0]", betas[0]) if betas[0] else ("momentum", settings.get("momentum", 0.0))
        if value:
            raise SpecError(
                f"optimizer.{field}={value:g} and compression.momentum={self.momentum:g} would apply momentum "
                "twice; use optimizer='sgd' without momentum, or compression.momentum=0"
            )

    def codec(self) -> Any:
        from shardscope.methods.compressors.topk._torch import WarmUpTopKCodec

        return WarmUpTopKCodec(self)

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.dgc._torch import MomentumCorrection, local_max_norm
        from shardscope.training.compression.memory import ErrorFeedback
        from shardscope.training.compression.packed import Packed

        memory = MomentumCorrection(self.momentum, local_max_norm(self.clip, job.num_data_ranks))
        shares = None if self.meets == "gather" else ErrorFeedback("share")
        return Packed(self.name, self.codec(), memory=memory, shares=shares, exchange=self.exchange)
