"""The messages of ZeRO, one by one: reduce-scatters of gradients and all-gathers of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardscope.analytic.communication.plan import (
    Exchange,
    When,
    in_groups,
    pair_rounds,
    ring_rounds,
    whole,
)
from shardscope.analytic.communication.ring import chunk_sizes, ring_slices
from shardscope.analytic.communication.traffic import by_backend, repeated
from shardscope.analytic.communication.zero import (
    ShardCollectives,
    across_replicas,
    agreement_traffic,
    checks_of_units,
    padded_buckets,
)
from shardscope.analytic.schedules.stage_passes import PHASES, StagePass
from shardscope.analytic.sharding import Shape, padded_elements


@dataclass(frozen=True)
class ShardedPlan:
    """Settings of a sharded step; see `fully_sharded_traffic` for their meaning."""

    world_size: int
    collectives: ShardCollectives
    replicas: int
    micro_batches: int

    @property
    def num_shards(self) -> int:
        """Number of ranks that together hold one copy of the model."""
        return self.world_size // self.replicas

    def of_buckets(self, bucket_elements: Sequence[int], *, reductions: int = 1) -> Iterator[Exchange]:
        """Yield the exchanges of flat buckets, whose traffic is `flat_shards_traffic`."""
        sizes = padded_buckets(bucket_elements, self.world_size, self.collectives)
        total = sum(sizes)
        for micro_batch in range(self.micro_batches - reductions, self.micro_batches):
            ready = 0
            for size in sizes:
                ready += size
                yield from self._reduced(size, When("backward", ready / total, micro_batch))
        for size in sizes:
            yield from self._gathered(size, When("optimizer"))

    def exchanges(
        self,
        units: Sequence[Sequence[Shape]],
        taught: Sequence[Sequence[Shape]],
        passes: Sequence[Sequence[StagePass]],
    ) -> Iterator[Exchange]:
        """Yield the exchanges of ZeRO-2 or ZeRO-3, whose traffic is `fully_sharded_traffic`, in order.

        A unit is gathered before its forward pass, in stage 3 again before its backward pass, and its gradients are
        reduce-scattered after its backward pass. Passes are divided among units in proportion to their parameters,
        except for split backward passes, which gather all units first and reduce their gradients last.

        Args:
            units: Shapes of the parameters in each FSDP unit.
            taught: For each unit, the shapes of the parameters that get gradients.
            passes: For each unit, the passes of a step.
        """
        sizes = [self._elements(shapes) for shapes in units]
        summed = [self._elements(shapes) for shapes in taught]
        starts = _starts(sizes)
        running = [{(each.micro_batch, each.phase): each for each in own} for own in passes]
        forwards = [*range(len(units))]
        backwards = [*forwards[:0:-1], *forwards[:1]]
        for micro_batch in range(self.micro_batches):
            for phase in PHASES:
                for unit in forwards if phase == "forward" else backwards:
                    each = running[unit].get((micro_batch, phase))
                    if each is None:
                        continue
                    begins, done = starts[unit], 1.0
                    if phase != "forward":
                        is_whole = unit == 0 or each.is_split
                        begins = 0.0 if is_whole else max(0.0, 1.0 - starts[unit] - sizes[unit] / sum(sizes))
                        done = 1.0 if is_whole else 1.0 - starts[unit]
                    if each.gathers:
                        yield from self._gathered(sizes[unit], When(phase, begins, micro_batch))
                    if each.reduces and summed[unit]:
                        yield from self._reduced(summed[unit], When(phase, done, micro_batch))
        yield from self._at_the_end(summed, sum(each.gathers for own in passes for each in own))

    def _at_the_end(self, summed: Sequence[int], num_gathers: int) -> Iterator[Exchange]:
        """Yield the all-reduces across replicas, and the checks that ranks ran the same layers."""
        end = When("backward", 1.0, self.micro_batches - 1)
        num_taught = sum(map(bool, summed))
        meetings = checks_of_units(
            self.collectives, num_taught, num_gathers, self.micro_batches, replicas=self.replicas
        )
        if self.replicas > 1:
            same_shard = (np.arange(self.world_size) + self.num_shards) % self.world_size
            for size in filter(None, summed):
                shard = size // self.num_shards * self.collectives.element_bytes
                sent = across_replicas(shard, self.num_shards, self.replicas)
                yield from whole(sent, end, towards=same_shard)
        digest = int(agreement_traffic(1, self.world_size)["agreement"].bytes[0]) // (self.world_size - 1)
        for _ in range(meetings):
            yield Exchange("agreement", end, pair_rounds(digest, self.world_size))

    def _elements(self, shapes: Sequence[Shape]) -> int:
        return sum(padded_elements(shape, self.num_shards) for shape in shapes)

    def _gathered(self, num_elements: int, when: When) -> list[Exchange]:
        return self._carried("all_gather", num_elements, self.collectives.element_bytes, when, gathers=True)

    def _reduced(self, num_elements: int, when: When) -> list[Exchange]:
        compression = self.collectives.compression
        if compression is None:
            return self._carried("reduce_scatter", num_elements, self.collectives.element_bytes, when)
        op, count, width = compression.share_collective(num_elements // self.num_shards, self.num_shards)
        if op == "sum":
            return self._carried("reduce_scatter", count, width, when)
        rounds = in_groups(pair_rounds(count * width, self.num_shards), self._groups)
        return [Exchange("packet_all_to_all", when, rounds)]

    def _carried(
        self, op: str, num_elements: int, width: int, when: When, *, gathers: bool = False
    ) -> list[Exchange]:
        backend, shards = self.collectives.backend, self.num_shards
        if backend is not None:
            sent = by_backend(op, num_elements * width, shards, backend=backend)
            to_next = np.concatenate([np.roll(group, -1) for group in self._groups])
            return whole(repeated(sent, self.replicas), when, gathers=gathers, towards=to_next)
        shares = self.collectives.shares
        rounds = in_groups(ring_rounds(op, num_elements, width, shards, shares=shares), self._groups)
        slices = None if shares is None else ring_slices(chunk_sizes(num_elements, shards, shares), width)
        return [Exchange(f"ring_{op}", when, rounds, gathers=gathers, slices=slices)]

    @property
    def _groups(self) -> list[tuple[int, ...]]:
        shards = self.num_shards
        return [tuple(range(first, first + shards)) for first in range(0, self.world_size, shards)]


def _starts(sizes: Sequence[int]) -> list[float]:
    """Return the fraction of a forward pass that is done when each unit starts; unit 0 encloses all other units."""
    total, done, starts = sum(sizes), 0, []
    for size in sizes:
        starts.append(done / total)
        done += size
    return starts
