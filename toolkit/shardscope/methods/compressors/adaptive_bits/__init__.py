"""Integers of 2 to 8 bits in blocks, with bits reallocated between layers to reduce the error."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.methods.compressors.packed import check_block
from shardscope.spec.compression import Collective, Compression, Meeting, Shapes
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import Count

LEAST, MOST = 2, 8
"""Minimum and maximum number of bits per element."""

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class AdaptiveBits(Compression):
    """Rounds elements to integers of 2 to 8 bits, and reallocates bits between layers every `update_every` steps."""

    name = "adaptive-bits"
    carriage = "layers"
    family = "Block quantization"
    look = MethodStyle("#2a86d1", "longdashdot", "cross")
    is_fixed = False

    budget: float = Field(default=4.0, gt=0, le=8)
    """Mean number of bits per element over all layers, not counting the scales of blocks: 2 to 8."""
    update_every: Count = 20
    """Number of steps between measurements of the gradients; each measurement reallocates the bits."""
    block: int = Field(default=256, ge=8, le=65536)
    """Number of elements that share one scale: a multiple of 8, from 8 to 65536."""
    feedback: bool = False
    """Error feedback: add the compression error of a step to the next step's gradient."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        check_block(self.block)
        if self.budget < 2:
            raise SpecError(f"compression.budget={self.budget:g} bits per element is less than 2; use 2 to 8")
        return self

    def collectives(
        self, shapes: Shapes, world_size: int, *, plan: Sequence[int] | None = None
    ) -> Sequence[Collective]:
        from shardscope.analytic.communication.compressed import mixed_packet_bytes

        bits = [floor(self.budget)] * len(shapes) if plan is None else plan
        packet = mixed_packet_bytes(shapes, bits, self.block, world_size)
        return [Collective("all_to_all", packet), Collective("all_gather", packet)]

    @property
    def meets(self) -> Meeting:
        return "two-phase"

    def bounds(
        self, shapes: Shapes, world_size: int, step: int
    ) -> tuple[Sequence[Collective], Sequence[Collective]] | None:
        """Return the collectives with the least and the most traffic; None before bits are first reallocated.

        Until then, the traffic is known exactly. The least traffic results from packing the bucket with 2 bits per
        element, and the most from packing each tensor separately with 8 bits.
        """
        if step <= self.update_every:
            return None
        least, alone = (
            self.collectives(shapes, world_size, plan=[LEAST] * len(shapes)),
            [self.collectives([shape], world_size, plan=[MOST])[0].num_elements for shape in shapes],
        )
        return least, [each._replace(num_elements=sum(alone)) for each in least]

    def kept_bytes(self, shapes: Shapes, world_size: int, *, scatters: bool = False) -> int:
        """Return the bytes of the bucket's residual; 0 without error feedback."""
        from shardscope.analytic.communication.compressed import FLOAT_BYTES

        return self.feedback * FLOAT_BYTES * sum(prod(shape) for shape in shapes)

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.adaptive_bits._torch import AdaptiveBitsCompressor

        return AdaptiveBitsCompressor(
            self.budget, self.update_every, block=self.block, feedback=self.feedback
        )
