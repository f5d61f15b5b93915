"""Local SGD: parameters are averaged periodically instead of gradients (Stich 2019, arXiv:1805.09767)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from shardscope.spec.compression import Collective, Compression, Shapes
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import Count

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class LocalSgd(Compression):
    """Each rank trains independently, and the ranks average their parameters every few steps."""

    name = "local-sgd"
    carriage = "steps"
    family = "Periodic averaging"
    look = MethodStyle("#c49a0c", "solid", "hexagon")
    is_fixed = False

    every: Count = 8
    """Number of steps between averagings of the ranks' parameters."""

    @property
    def period(self) -> int:
        return self.every

    def collectives(
        self, shapes: Shapes, world_size: int, *, plan: Sequence[int] | None = None
    ) -> Sequence[Collective]:
        from shardscope.analytic.communication.compressed import FLOAT_BYTES

        return [Collective("sum", sum(prod(shape) for shape in shapes), FLOAT_BYTES)]

    def kept_bytes(self, shapes: Shapes, world_size: int, *, scatters: bool = False) -> int:
        return 0

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.local_sgd._torch import LocalSGD

        return LocalSGD(self.name, self.every)
