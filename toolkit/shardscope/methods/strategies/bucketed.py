"""Base class of data-parallel strategies that exchange gradients in buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from shardscope.spec.numbers import MessageMiB
from shardscope.spec.strategy import Strategy

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import Exchange, StepPlan, When
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.analytic.sharding import Ints
    from shardscope.spec.compression import Collective


_INDEX_BYTES = 4


class BucketedStrategy(Strategy):
    """Base class of data-parallel strategies that exchange gradients in buckets, overlapped with the backward pass."""

    has_exchanges = True
    composes = True
    zero_stage: ClassVar[int | None] = 0

    bucket_mb: MessageMiB = 25.0
    """Size of a gradient bucket in MiB, 0 < value <= 1024; a bucket is sent as soon as it is complete."""

    @property
    def ring_directions(self) -> int | None:
        """Number of directions of the ring that reduces each bucket; None if buckets are not reduced by a ring."""
        return None

    def degrees(self, world_size: int) -> Mapping[str, Any] | None:
        """Return the degrees of the layout: the number of data-parallel replicas."""
        return {"data": world_size}

    def exchanged_bytes(
        self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1
    ) -> float | None:
        """Return the total bytes sent: 2(W-1) S for W ranks and S bytes of gradients, the minimum of any all-reduce."""
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

        DDP broadcasts the model's buffers in every step. After the first backward pass, it rebuilds its buckets in the
        order in which gradients became ready, and broadcasts the number of buckets, their sizes, and the bucket of each
        tensor.
        """
        from shardscope.analytic.communication.traffic import by_backend, together

        if self.sum_traffic(step.num_elements, step.element_bytes, step) is None:
            return None
        broadcasts = (
            by_backend("broadcast", size, step.world_size, backend=step.backend)
            for size in self._broadcast_sizes(step)
        )
        return together([*broadcasts, *self._exchanges(step)])

    def _broadcast_sizes(self, step: JobStep) -> list[int]:
        """Return the bytes of each broadcast in a step."""
        if step.follows_passes:
            return []
        sizes = [*step.trace.buffer_sizes]
        if step.number == (1 if step.job.compression.is_on else 2):
            count = len(step.buckets(self.bucket_mb))
            sizes += [_INDEX_BYTES * (len(step.trained) + 1), _INDEX_BYTES * count]
        return sizes

    def sum_exchanges(
        self, num_elements: int, element_bytes: int, step: JobStep, when: When
    ) -> list[Exchange]:
        """Return the exchanges that sum one flat tensor; by default, one exchange with the totals of `sum_traffic`,
        without single messages.

        The arguments are the same as for `sum_traffic`; `when` is the time at which the sum starts.
        """
        from shardscope.analytic.communication.plan import whole

        return whole(self.sum_traffic(num_elements, element_bytes, step) or {}, when)

    def plan(self, step: JobStep) -> StepPlan | None:
        """Return the broadcasts of the model's buffers, and an exchange of each bucket when its gradients are ready."""
        from shardscope.analytic.communication.plan import StepPlan, When, whole
        from shardscope.analytic.communication.traffic import by_backend

        if self.sum_traffic(step.num_elements, step.element_bytes, step) is None:
            return None
        first = [
            by_backend("broadcast", size, step.world_size, backend=step.backend)
            for size in self._broadcast_sizes(step)
        ]
        broadcasts = [each for traffic in first for each in whole(traffic, When("forward", 0.0))]
        return StepPlan((*broadcasts, *self._bucket_exchanges(step)))

    def _bucket_exchanges(self, step: JobStep) -> Iterator[Exchange]:
        from shardscope.analytic.communication.plan import Exchange, When, pair_rounds

        compression, ready = step.compression, 0
        if compression.period > 1:
            if step.number % compression.period == 0:
                yield from self.sum_exchanges(step.num_elements, step.element_bytes, step, When("optimizer"))
            return
        for shapes in step.packed(self.bucket_mb):
            ready += sum(prod(shape) for shape in shapes)
            when = When("backward", ready / step.num_elements, step.micro_batches - 1)
            for op, count, width in compression.collectives(shapes, step.world_size):
                if op == "sum":
                    size = width if step.is_compressed else step.element_bytes
                    yield from self.sum_exchanges(count, size, step, when)
                else:
                    yield Exchange(f"packet_{op}", when, pair_rounds(count * width, step.world_size))

    def states(self, step: JobStep) -> RankStates:
        """Return the bytes on each rank: a whole replica, whose gradients are stored in the buckets.

        After buckets have been rebuilt, a job with several micro-batches accumulates gradients in a second copy outside
        the buckets.
        """
        from shardscope.analytic.memory import spread_states

        whole = spread_states(step)
        has_buckets = step.number > (1 if step.job.compression.is_on else 2) and not step.follows_passes
        copies = 2 if has_buckets and step.micro_batches > 1 else 1
        held = whole._replace(gradients=whole.gradients * copies)
        return held.with_work_buffers(step, lambda: self._buffer_bytes(step))

    def _buffer_bytes(self, step: JobStep) -> int | Ints | None:
        """Return the bytes of the optimizer's update buffers, the residuals, and all receive buffers used so far."""
        from shardscope.analytic.memory.work_space import compression_state_bytes, updates_of_whole

        kept = compression_state_bytes(step, step.packed(self.bucket_mb))
        buffers = self.sum_room([*self._sums(replace(step, number=1)), *self._sums(step)], step)
        return None if kept is None or buffers is None else updates_of_whole(step) + kept + buffers

    def _sums(self, step: JobStep) -> Iterator[tuple[int, int]]:
        """Yield the number of elements and the element size of each flat tensor that ranks have summed by this step."""
        now = step.compression
        if now.period > 1:
            if step.number >= now.period:
                yield step.num_elements, step.element_bytes
            return
        for shapes in step.packed(self.bucket_mb):
            for op, count, width in now.collectives(shapes, step.world_size):
                if op == "sum":
                    yield count, width if step.is_compressed else step.element_bytes

    def sum_room(self, sums: Sequence[tuple[int, int]], step: JobStep) -> int | Ints | None:
        """Return the bytes of the receive buffers that each rank keeps for summing flat tensors.

        Args:
            sums: For each tensor, its number of elements and the size of one element in bytes.
            step: The training step, which gives the number of ranks.

        Returns:
            An array with one number per rank, or a single number that applies to all ranks; None if unknown.
        """
        return None

    def _exchanges(self, step: JobStep) -> Iterator[Traffic]:
        from shardscope.analytic.communication.traffic import between

        compression = step.compression
        if compression.period > 1:  # parameters are averaged every `period` steps, as one tensor
            if step.number % compression.period == 0:
                yield self.sum_traffic(step.num_elements, step.element_bytes, step) or {}
            return
        for shapes in step.packed(self.bucket_mb):
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
