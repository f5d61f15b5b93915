"""ZeRO-1: whole gradients, shards of optimizer state, and the bytes of one ring all-reduce per step.

torch's `ZeroRedundancyOptimizer` assigns whole parameters to ranks, which makes shards uneven, and broadcasts them one
by one. Here, the parameters are stored in flat buckets, each of which is split into one chunk for each rank, equal or
in proportion to the ranks' shares. As soon as the backward pass has filled a bucket, a background thread on each rank
reduce-scatters it; the order of buckets is the same on all ranks. Each rank updates its own chunks with its shard of
the optimizer state. Then the buckets are all-gathered in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardscope.machine import usable_memory_bytes
from shardscope.methods.strategies.flat_shards import FlatShards
from shardscope.methods.strategies.zero_1._torch_flat import FlatBucket, FlatPiece, Named, cut_into_buckets
from shardscope.spec.shares import shares_by_memory
from shardscope.training import clock
from shardscope.training.collectives.packets import Packets
from shardscope.training.collectives.ring import RingAllReduce
from shardscope.training.collectives.sender import Sender
from shardscope.training.compression import Bucket, Carrier
from shardscope.training.context import RankContext
from shardscope.training.memory import Held
from shardscope.training.strategies.base import no_gradient_error
from shardscope.training.strategies.partitioned import ParameterShare, Partitioned


class Zero1Rank(Partitioned):
    """ZeRO-1 strategy: each rank updates its share of all elements."""

    settings: FlatShards
    keeps_gradients: ClassVar[bool] = True
    """Whether a rank keeps the whole gradients of a step, and not only its own chunks."""
    is_adopted = False
    """Whether another object runs the passes, so that buckets are sent after the last one."""

    def wrap(self, model: nn.Module) -> nn.Module:
        trained = [(name, p) for name, p in self.own_parameters(model) if p.requires_grad]
        self._flatten(trained, model)
        self.handles = [p.register_post_accumulate_grad_hook(self._arrived) for _, p in trained]
        return model

    def take(self, named: Sequence[Named], roots: Sequence[nn.Module]) -> None:
        trained = [(name, p) for name, p in named if p.requires_grad]
        self._flatten(trained, self.model)
        self.is_adopted = True
        # passes need not end in `AccumulateGrad`, whose hooks `wrap` uses
        self.handles = [p.register_hook(partial(self._computed, p)) for _, p in trained]
        self._hold()

    def _computed(self, parameter: nn.Parameter, _: Tensor) -> None:
        index, name = self.order[id(parameter)]
        self.missing[index].discard(name)

    def _flatten(self, trained: Sequence[Named], model: nn.Module) -> None:
        """Move parameters into flat buckets, and set this rank's pieces of them."""
        settings, group = self.settings, self.context.group
        assert group is not None
        self.is_ring = settings.collectives == "ring"
        cut = cut_into_buckets(trained, int(settings.bucket_mb * 2**20))
        self.ring = RingAllReduce(group, shares=shares_of_ranks(settings, model, cut, self.context))
        if self.compressor is not None:
            ring, packets = self.ring, Packets(group)
            self.carrier = Carrier(
                ring.all_reduce_, packets, self.context.meter, self.job.seed, ring.reduce_scatter_
            )
        self.sender = Sender(self.name)
        even = not self.is_ring or self.compressor is not None
        self.buckets = [
            FlatBucket(
                named, self.context.rank, self.context.world_size, even=even, chunk_sizes=self.ring.chunk_sizes,
                keeps_gradients=self.keeps_gradients,
            )
            for named in cut
        ]  # fmt: skip
        by_name = {piece.name: piece for bucket in self.buckets for piece in bucket.pieces}
        self.pieces = [by_name[name] for name, _ in trained]
        self.order = {id(p): (index, name) for index, b in enumerate(self.buckets) for name, p in b.named}
        self.is_last = True
        self.reduce_squares = self.reduce_grad_square = self._sum_over_ranks
        self.copies_of_gradients = 1

    @property
    def part_number(self) -> int:
        return self.context.rank

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        held = super().held(optimizer)
        return {**held, "buffers": [*held["buffers"], *self.ring.work_space]}

    def close(self) -> None:
        super().close()
        # hooks of a parameter keep its strategy, beyond the reach of Python's collector
        for handle in self.handles:
            handle.remove()
        self.sender.close()

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        self.is_last = False
        yield
        self.is_last = True

    def begin_step(self, optimizer: torch.optim.Optimizer, num_micro_batches: int) -> None:
        super().begin_step(optimizer, num_micro_batches)
        self._clear()

    def end_step(self, *, skipped: bool) -> None:
        super().end_step(skipped=skipped)
        if not skipped:
            for done in [
                self.sender.submit(partial(self._gather, bucket.weights, bucket)) for bucket in self.buckets
            ]:
                done.result()

    # Gradients, in the order in which the backward pass computes them.

    def _clear(self) -> None:
        for bucket in self.buckets:
            bucket.clear_gradients()
        self._begin_pass()

    def _begin_pass(self) -> None:
        """Mark the gradients of all parameters as missing, and all buckets as not sent."""
        self.missing = [{name for name, _ in bucket.named} for bucket in self.buckets]
        self.sent: list[Future[None]] = []

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Record that a gradient is complete; send buckets as they become complete, in the same order on all ranks."""
        if not self.is_last:
            return
        index, name = self.order[id(parameter)]
        self.missing[index].discard(name)
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self.context.meter.handed_over = clock.now()
            self.sent.append(self.sender.submit(partial(self._reduce, self.buckets[len(self.sent)])))

    def finish_exchange(self) -> None:
        if self.is_adopted:
            self._send_all()
        self._settle()
        for bucket in self.buckets:
            for piece in bucket.pieces:
                piece.parameter.grad = piece.grad

    def _send_all(self) -> None:
        """Send all buckets, whose adopted parameters have the gradients of all passes of a step."""
        for bucket, missing in zip(self.buckets, self.missing, strict=True):
            grads = bucket.wholes(bucket.grads)
            missing -= {name for name in missing if grads[name].any()}  # of a copy on another rank
            self.sent.append(self.sender.submit(partial(self._reduce, bucket)))

    def _settle(self) -> None:
        """Wait until all buckets are reduced.

        Raises:
            SpecError: A parameter has no gradient.
        """
        absent = [name for names in self.missing for name in names]
        if absent:
            raise no_gradient_error(absent[0], self.name)
        for done in self.sent:
            done.result()

    def _reduce(self, bucket: FlatBucket) -> None:
        """Reduce-scatter a bucket: this rank's chunk becomes the mean over all ranks; other chunks are overwritten."""
        self.context.meter.hold_gradients()
        own = bucket.own(bucket.grads)
        if self.compressor is not None:
            self._compress(bucket, own)
            return
        if not self.is_ring:
            reduced = torch.empty_like(own)
            dist.reduce_scatter_tensor(reduced, bucket.grads, group=self.context.group)
            own.copy_(reduced)
        elif self.context.is_staged(bucket.grads.nbytes, self.context.world_size - 1):
            own.copy_(self.ring.reduce_scatter_(bucket.grads.cpu()))
        else:
            self.ring.reduce_scatter_(bucket.grads)
        own.div_(self.context.world_size)

    def _compress(self, bucket: FlatBucket, own: Tensor) -> None:
        assert self.compressor is not None
        staged = self.context.is_staged(bucket.grads.nbytes, self.context.world_size - 1)
        out = torch.empty_like(own, device="cpu") if staged else own
        flat = bucket.grads.cpu() if staged else bucket.grads
        names, shapes = zip(*bucket.layout, strict=True)
        self.compressor.scatter_mean(Bucket(names, shapes, flat, self.context.meter.step), self.carrier, out)
        if staged:
            own.copy_(out)

    def _gather(self, flat: Tensor, bucket: FlatBucket) -> None:
        """All-gather a tensor that is laid out like `bucket` from the chunks of all ranks, in place."""
        if not self.is_ring:
            own = bucket.own(flat).clone()  # as bytes, since not every backend can send every dtype
            dist.all_gather_into_tensor(
                flat.view(torch.uint8), own.view(torch.uint8), group=self.context.group
            )
        elif self.context.is_staged(flat.nbytes, self.context.world_size - 1):
            flat.copy_(self.ring.all_gather_(flat.cpu()))
        else:
            self.ring.all_gather_(flat)

    def join(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole tensors on every rank, which therefore stores the whole optimizer state during a checkpoint."""
        joined: dict[str, Tensor] = {}
        for bucket in self.buckets:
            for dtype in dict.fromkeys(
                parts[piece.name].dtype for piece in bucket.pieces if piece.name in parts
            ):
                named = {p.name: parts[p.name] for p in bucket.pieces if p.name in parts}
                flat = self._gathered({n: t for n, t in named.items() if t.dtype == dtype}, bucket, dtype)
                wholes = bucket.wholes(flat)
                joined |= {name: wholes[name] for name, part in named.items() if part.dtype == dtype}
        return joined

    def _gathered(self, parts: Mapping[str, Tensor], bucket: FlatBucket, dtype: torch.dtype) -> Tensor:
        """Gather a bucket from all ranks' chunks of the parameters in `parts`; other parameters are filled with 0."""
        flat = torch.zeros_like(bucket.weights, dtype=dtype)
        none = torch.zeros_like(bucket.own(flat))
        pieces = [parts.get(piece.name, none[: piece.stop - piece.start]) for piece in bucket.pieces]
        own = torch.cat(pieces)
        bucket.own(flat)[: len(own)] = own
        self._gather(flat, bucket)
        return flat

    def empty(self, piece: ParameterShare, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(piece.whole, dtype=dtype)

    def part(self, piece: ParameterShare, whole: Tensor) -> Tensor:
        assert isinstance(piece, FlatPiece)
        return whole.reshape(-1)[piece.start : piece.stop]

    def _sum_over_ranks(self, squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=self.context.group)
        return squares


def shares_of_ranks(
    settings: FlatShards, model: nn.Module, buckets: Sequence[Sequence[Named]], context: RankContext
) -> tuple[int, ...] | None:
    """Return the relative shard size of each rank, or None if all are equal; must be called by all ranks.

    Args:
        settings: The strategy.
        model: The model.
        buckets: Trained parameters of the model, by bucket.
        context: This rank's context.

    Raises:
        SpecError: A rank has no memory left for optimizer state, or the emulated cluster does not specify memory.
    """
    if not isinstance(settings.shards, str):
        return settings.shards
    weights = sum(p.nbytes for p in model.parameters())
    whole = settings.whole_bytes(weights, [sum(p.nbytes for _, p in named) for named in buckets])
    memory = torch.zeros(context.world_size, dtype=torch.float64, device=context.device)
    memory[context.rank] = _own_memory_bytes(context)
    dist.all_reduce(memory, group=context.group)
    return shares_by_memory(memory.tolist(), whole)


def _own_memory_bytes(context: RankContext) -> float:
    """Return the bytes of memory of this rank's device, divided by the ranks that share it."""
    if context.emulation is not None:
        return context.emulation.cluster.stated_memory()[context.rank]
    here = context.whole.local_world_size or context.whole.world_size
    if context.device.type == "cuda":
        each_gpu = -(-here // torch.cuda.device_count())
        return float(torch.cuda.get_device_properties(context.device).total_memory) / each_gpu
    return usable_memory_bytes() / here
