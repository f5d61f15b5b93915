"""Integers in blocks, with bits reallocated between layers to minimise the error."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.methods.compressors.packed import check_block
from shardscope.spec.compression import Collective, Compression, Meeting, Shapes
from shardscope.spec.look import Look
from shardscope.spec.numbers import Count

LEAST, MOST = 2, 8
"""Fewest and most bits of an element."""

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class AdaptiveBits(Compression):
    """Reallocates a bit budget across layers every `update_every` steps."""

    name = "adaptive-bits"
    carriage = "layers"
    family = "Integers in blocks"
    look = Look("#2a86d1", "longdashdot", "cross")
    is_fixed = False

    budget: float = Field(default=4.0, gt=0, le=8)
    """Mean bits per element, over all layers, without the blocks' scales, 2 to 8."""
    update_every: Count = 20
    """Steps between two measurements of the gradients, after which bits are reallocated."""
    block: int = Field(default=256, ge=8, le=65536)
    """Elements that share one scale; a multiple of 8, 8 to 65536."""
    feedback: bool = False
    """Error feedback: what a step leaves out is added to the next step's gradient."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check_block(self.block)
        if self.budget < 2:
            raise SpecError(f"compression.budget={self.budget:g} bits an element is less than 2; use 2 to 8")
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
        """Bounds of the collectives: a bucket at the fewest bits, or each tensor padded separately at the most.

        None before the first reallocation, when traffic is known exactly.
        """
        if step <= self.update_every:
            return None
        least, alone = (
            self.collectives(shapes, world_size, plan=[LEAST] * len(shapes)),
            [self.collectives([shape], world_size, plan=[MOST])[0].num_elements for shape in shapes],
        )
        return least, [each._replace(num_elements=sum(alone)) for each in least]

    def kept_bytes(self, shapes: Shapes, world_size: int, *, scatters: bool = False) -> int:
        """Bytes of the bucket's residual; 0 without error feedback."""
        from shardscope.analytic.communication.compressed import FLOAT_BYTES

        return self.feedback * FLOAT_BYTES * sum(prod(shape) for shape in shapes)

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.adaptive_bits._torch import AdaptiveBitsCompressor

        return AdaptiveBitsCompressor(
            self.budget, self.update_every, block=self.block, feedback=self.feedback
        )
