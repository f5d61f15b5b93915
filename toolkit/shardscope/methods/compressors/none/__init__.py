"""Gradients as they are."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from shardscope.spec.compression import Compression, Shapes
from shardscope.spec.look import Look

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class Uncompressed(Compression):
    """Gradients meet as they are; bytes are those of our ring."""

    name = "none"
    carriage = "none"
    family = "As they are"
    look = Look("#777c85")
    codec_passes = 0.0
    is_on = False
    survives_overflow = True

    @property
    def differs_because(self) -> None:
        return None

    def bucket_bytes(
        self,
        shapes: Shapes,
        world_size: int,
        *,
        directions: int = 1,
        plan: Sequence[int] | None = None,
    ) -> Any:
        from shardscope.analytic.communication.compressed import summed_bytes

        return summed_bytes([sum(prod(shape) for shape in shapes)], world_size, directions=directions)

    def rounds(self, shapes: Shapes, world_size: int) -> int:
        return 2 * (world_size - 1)

    def build(self, job: Job) -> None:
        return None
