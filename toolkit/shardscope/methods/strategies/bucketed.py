"""Base class of data-parallel strategies that exchange gradients in buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from shardscope.spec.numbers import MessageMiB
from shardscope.spec.strategy import Strategy

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.analytic.sharding import Ints
    from shardscope.spec.compression import Collective


_INDEX_BYTES = 4


class BucketedStrategy(Strategy):
    """Base class of data-parallel strategies that exchange gradients in buckets, overlapped with the backward pass."""

    has_exchanges = True
    zero_stage: ClassVar[int | None] = 0

    bucket_mb: MessageMiB = 25.0
    """Size of a gradient bucket in MiB, 0 < value <= 1024; a bucket is sent as soon as it is complete."""

    @property
    def ring_directions(self) -> int | None:
        """Number of directions of the ring that reduces each bucket; None if no ring does."""
        return None

    def degrees(self, world_size: int) -> Mapping[str, Any] | None:
        """Return the degrees of the layout: data-parallel replicas."""
        return {"data": world_size}

    def exchanged_bytes(
        self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1
    ) -> float | None:
        """Return 2(W-1) S bytes, the minimum for any all-reduce."""
        from shardscope.analytic.communication import all_reduce_bytes

        return float(all_reduce_bytes(gradient_bytes, world_size))

    def sum_traffic(self, num_elements: int, element_bytes: int, step: JobStep) -> Traffic | None:
        """Return the traffic for summing one flat tensor over all ranks; None if unknown.

        Args:
            num_elements: Number of elements in the tensor.
            element_bytes: Size of one element, in bytes.
            step: The training step, which gives the number of ranks and the backend.
        """
        return None

    def traffic(self, step: JobStep) -> Traffic | None:
        """Return the traffic of the buckets and of `DistributedDataParallel`'s broadcasts.

        DDP broadcasts the model's buffers in every step. Once, it rebuilds its buckets in the order of the gradients in
        its first backward pass, and broadcasts the bucket of each tensor, the number of buckets and their sizes.
        """
        from shardscope.analytic.communication.traffic import by_backend, together

        if self.sum_traffic(step.num_elements, step.element_bytes, step) is None:
            return None
        sizes = [*step.trace.buffer_sizes]
        if step.number == (1 if step.job.compression.is_on else 2):
            count = len(step.buckets(self.bucket_mb))
            sizes += [_INDEX_BYTES * (len(step.trained) + 1), _INDEX_BYTES * count]
        broadcasts = (by_backend("broadcast", size, step.world_size, backend=step.backend) for size in sizes)
        return together([*broadcasts, *self._exchanges(step)])

    def states(self, step: JobStep) -> RankStates:
        """Return the bytes of whole replicas, whose gradients are stored in the buckets.

        With several micro-batches, a second copy of the gradients accumulates beside the buckets once these have been
        rebuilt.
        """
        from shardscope.analytic.memory import spread_states

        whole = spread_states(step)
        has_buckets = step.number > (1 if step.job.compression.is_on else 2)
        copies = 2 if has_buckets and step.micro_batches > 1 else 1
        held = whole._replace(gradients=whole.gradients * copies)
        return held.working_in(step, lambda: self._room(step))

    def _room(self, step: JobStep) -> int | Ints | None:
        """Return the bytes of the optimizer's update buffers, of residuals, and of receive buffers used so far."""
        from shardscope.analytic.memory.work_space import compression_state_bytes, updates_of

        kept = compression_state_bytes(step, step.buckets(self.bucket_mb))
        room = self.sum_room([*self._sums(replace(step, number=1)), *self._sums(step)], step)
        return None if kept is None or room is None else updates_of(step.rows, step) + kept + room

    def _sums(self, step: JobStep) -> Iterator[tuple[int, int]]:
        """Yield number and size of the elements of each tensor that is summed in this step or a similar earlier one."""
        now = step.compression
        if now.period > 1:
            if step.number >= now.period:
                yield step.num_elements, step.element_bytes
            return
        for shapes in step.buckets(self.bucket_mb):
            for op, count, width in now.collectives(shapes, step.world_size):
                if op == "sum":
                    yield count, width if step.is_compressed else step.element_bytes

    def sum_room(self, sums: Sequence[tuple[int, int]], step: JobStep) -> int | Ints | None:
        """Return the bytes of the receive buffers that each rank keeps for summing flat tensors.

        Args:
            sums: Number of elements of each tensor, and size of one element in bytes.
            step: The training step, which gives the number of ranks.

        Returns:
            An array of shape `(W,)`, or one number for all ranks; None if unknown.
        """
        return None

    def _exchanges(self, step: JobStep) -> Iterator[Traffic]:
        from shardscope.analytic.communication.traffic import between

        compression = step.compression
        if compression.period > 1:  # parameters are averaged every `period` steps, as one tensor
            if step.number % compression.period == 0:
                yield self.sum_traffic(step.num_elements, step.element_bytes, step) or {}
            return
        for shapes in step.buckets(self.bucket_mb):
            expected = self._carried(compression.collectives(shapes, step.world_size), step)
            bounds = compression.bounds(shapes, step.world_size, step.number)
            if bounds is None:
                yield expected
            else:
                least, most = (self._carried(each, step) for each in bounds)
                yield between(least, expected, most)

    def _carried(self, collectives: Sequence[Collective], step: JobStep) -> Traffic:
        from shardscope.analytic.communication.traffic import packets, together

        def parts() -> Iterator[Traffic]:
            for op, count, width in collectives:
                if op == "sum":
                    yield (
                        self.sum_traffic(count, width if step.is_compressed else step.element_bytes, step)
                        or {}
                    )
                else:
                    yield packets(f"packet_{op}", count * width, step.world_size)

        return together(parts())
