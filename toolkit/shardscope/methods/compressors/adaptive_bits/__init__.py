"""Integers in blocks whose bits move between layers, to where they take away most error."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.methods.compressors.packed import check_block
from shardscope.spec.compression import Compression, Meeting, Shapes
from shardscope.spec.look import Look
from shardscope.spec.numbers import Count

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
    """Mean bits an element, over all layers and without the blocks' scales, 2 to 8."""
    update_every: Count = 20
    """Steps between two looks at the gradients, after which bits move."""
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

    def bucket_bytes(
        self,
        shapes: Shapes,
        world_size: int,
        *,
        directions: int = 1,
        plan: Sequence[int] | None = None,
    ) -> Any:
        from shardscope.analytic.communication.compressed import everyone, mixed_packet_bytes

        bits = [floor(self.budget)] * len(shapes) if plan is None else plan
        packet = mixed_packet_bytes(shapes, bits, self.block, world_size)
        return everyone(2 * (world_size - 1) * packet, world_size)

    @property
    def meets(self) -> Meeting:
        return "two-phase"

    def rounds(self, shapes: Shapes, world_size: int) -> int:
        return 2

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.adaptive_bits._torch import AdaptiveBits

        return AdaptiveBits(self.budget, self.update_every, block=self.block, feedback=self.feedback)
