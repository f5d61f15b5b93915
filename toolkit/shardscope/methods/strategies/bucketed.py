"""Base of data-parallel strategies that exchange gradients in buckets."""

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
    """Base of data-parallel strategies that exchange gradients in buckets, overlapped with the backward pass."""

    has_exchanges = True
    zero_stage: ClassVar[int | None] = 0

    bucket_mb: MessageMiB = 25.0
    """Size of a gradient bucket in MiB; a bucket is sent as soon as all its gradients are there. 0 < value <= 1024."""

    @property
    def ring_directions(self) -> int | None:
        """Directions of the ring that reduces each bucket; None if it is not reduced by a ring."""
        return None

    def degrees(self, world_size: int) -> Mapping[str, Any] | None:
        """Layout: data-parallel replicas."""
        return {"data": world_size}

    def exchanged_bytes(
        self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1
    ) -> float | None:
        """2(W-1) S bytes, the minimum of any all-reduce."""
        from shardscope.analytic.communication import all_reduce_bytes

        return float(all_reduce_bytes(gradient_bytes, world_size))

    def sum_traffic(self, num_elements: int, element_bytes: int, step: JobStep) -> Traffic | None:
        """Traffic of summing one flat tensor over all ranks; None if unknown.

        Args:
            num_elements: Elements of the tensor.
            element_bytes: Bytes of one element.
            step: The job's step, for the number of ranks and the backend.
        """
        return None

    def traffic(self, step: JobStep) -> Traffic | None:
        """Traffic of each bucket, and of the broadcasts of `DistributedDataParallel`: buffers, and new buckets once.

        DDP rebuilds its buckets in the order of the gradients of its first backward pass, and broadcasts the bucket of
        each tensor, the number of buckets and their sizes.
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
        """States of whole replicas, each with its gradients in the buckets.

        With several micro-batches, gradients accumulate in a second copy next to the buckets, after the buckets have
        been rebuilt.
        """
        from shardscope.analytic.memory import spread_states

        whole = spread_states(step)
        has_buckets = step.number > (1 if step.job.compression.is_on else 2)
        copies = 2 if has_buckets and step.micro_batches > 1 else 1
        held = whole._replace(gradients=whole.gradients * copies)
        return held.working_in(step, lambda: self._room(step))

    def _room(self, step: JobStep) -> int | Ints | None:
        """Bytes of the optimizer's update buffers, of residuals, and of the receive buffers used so far."""
        from shardscope.analytic.memory.work_space import compression_state_bytes, updates_of

        kept = compression_state_bytes(step, step.buckets(self.bucket_mb))
        room = self.sum_room([*self._sums(replace(step, number=1)), *self._sums(step)], step)
        return None if kept is None or room is None else updates_of(step.rows, step) + kept + room

    def _sums(self, step: JobStep) -> Iterator[tuple[int, int]]:
        """Elements, and bytes of an element, of each tensor that is summed in this step, or in an earlier like it."""
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
        """Bytes of the receive buffers that each rank keeps for summing flat tensors.

        Args:
            sums: Elements of each tensor, and bytes of an element.
            step: The job's step, for the number of ranks.

        Returns:
            Shape `(W,)`, or one number for all ranks; None if the class does not specify it.
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
