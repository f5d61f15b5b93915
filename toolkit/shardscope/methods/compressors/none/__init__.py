"""Uncompressed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from shardscope.spec.compression import Collective, Compression, Shapes
from shardscope.spec.look import MethodStyle

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class Uncompressed(Compression):
    """Uncompressed gradients; predicted byte counts assume an all-reduce with Shardscope's own ring."""

    name = "none"
    carriage = "none"
    family = "Uncompressed"
    look = MethodStyle("#777c85")
    codec_passes = 0.0
    is_on = False
    survives_overflow = True

    @property
    def differs_because(self) -> None:
        return None

    def collectives(
        self, shapes: Shapes, world_size: int, *, plan: Sequence[int] | None = None
    ) -> Sequence[Collective]:
        from shardscope.analytic.communication.compressed import FLOAT_BYTES

        return [Collective("sum", sum(prod(shape) for shape in shapes), FLOAT_BYTES)]

    def kept_bytes(self, shapes: Shapes, world_size: int, *, scatters: bool = False) -> int:
        return 0

    def build(self, job: Job) -> None:
        return None
