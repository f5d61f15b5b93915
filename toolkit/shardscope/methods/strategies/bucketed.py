"""What data-parallel strategies share that exchange gradients in buckets."""

from __future__ import annotations

from typing import ClassVar

from shardscope.spec.numbers import MessageMiB
from shardscope.spec.strategy import Strategy


class BucketedStrategy(Strategy):
    """Base of data-parallel strategies that exchange gradients in buckets, overlapped with the backward pass."""

    has_exchanges = True
    zero_stage: ClassVar[int | None] = 0

    bucket_mb: MessageMiB = 25.0
    """Size of a gradient bucket in MiB; a bucket is sent as soon as all its gradients are there. 0 < value <= 1024."""

    @property
    def ring_directions(self) -> int | None:
        """Of the ring that each bucket goes around; None where its gradients meet in another way."""
        return None

    def exchanged_bytes(
        self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1
    ) -> float | None:
        """2(W-1) S: those of every all-reduce that moves no number twice."""
        from shardscope.analytic.communication import all_reduce_bytes

        return float(all_reduce_bytes(gradient_bytes, world_size))
