"""The pattern of ZeRO-2 and ZeRO-3: torch's `fully_shard` (FSDP2) on every block, with our ring in its collectives.

Each block of the model is one unit of communication; what no block holds alone (embeddings, norms, heads, and whatever
several blocks share) is one more. Parameters become DTensors cut along their first dimension, padded to a multiple of
the ranks; the optimizer works on the shards, and norms are summed over the ranks that hold other shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardscope.errors import SpecError
from shardscope.spec import strategy as spec
from shardscope.training.collectives.packets import Packets
from shardscope.training.collectives.ring import Ring
from shardscope.training.collectives.sharded import RingAllGather, RingReduceScatter, ShardRing
from shardscope.training.compression import Bucket, Carrier
from shardscope.training.gradient_noise import GradientNoise
from shardscope.training.memory import Held
from shardscope.training.models import units_of
from shardscope.training.sharding import local
from shardscope.training.strategies._partitioned import Partitioned, Piece
from shardscope.training.strategies._relayout import (
    ROOT,
    SHARDS,
    by_parameter,
    by_unit,
    shards_of,
    units_with_parameters,
)
from shardscope.training.strategies.base import LossFunction, MicroBatch, Predict, StepResult

_APART = 7919


class FullySharded(Partitioned):
    """Base of both stages; `keeps_gathered` is all they differ in."""

    lockstep = True
    keeps_gathered: ClassVar[bool]
    """Whether parameters stay gathered from the forward to the end of the last micro-batch's backward pass."""
    exchanged = 0
    """Micro-batches of the step whose gradients have been exchanged."""

    def wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule  # imports much; only these strategies need it

        settings = self.job.strategy
        assert isinstance(settings, spec.FullySharded)
        self.settings = settings
        _refuse_scalars(model, self.name)
        for parameter in model.parameters():  # FSDP2 takes no others, such as those in channels_last
            parameter.data = parameter.data.contiguous()
        mesh = self._mesh()
        self.shard_group = mesh.get_group(mesh.ndim - 1)
        self._shard(model, mesh)
        named = {name or ROOT: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
        self.unit_names, self.units = list(named), list(named.values())
        self.ring = self._plug_ring() if settings.collectives == "ring" else None
        self.pieces = [
            Piece(name, parameter, nn.Parameter(local(parameter.detach())))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self.reduce_squares = self.reduce_grad_square = self._sum_over_shards
        self.copies_of_gradients = settings.replicas
        return model

    def _mesh(self) -> DeviceMesh:
        """All ranks in a row, or a row for each replica."""
        replicas, kind = self.settings.replicas, self.context.device.type
        if replicas == 1:
            return init_device_mesh(kind, (self.context.world_size,))
        shape = (replicas, self.context.world_size // replicas)
        return init_device_mesh(kind, shape, mesh_dim_names=("replica", "shard"))

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        has_gpu = self.context.device.type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=has_gpu) if self.settings.offload else OffloadPolicy()
        for module in [*units_of(model), model]:
            fully_shard(
                module, mesh=mesh, reshard_after_forward=not self.keeps_gathered, offload_policy=policy
            )

    def _plug_ring(self) -> ShardRing:
        group, shards = self.context.group, dist.get_process_group_ranks(self.shard_group)
        assert group is not None
        around = Ring(group, members=shards)
        compress = None if self.compressor is None else self._compress
        if compress is not None:  # replicas draw random numbers of their own
            seed = self.job.seed + _APART * (self.context.rank // len(shards))
            packets = Packets(group, tuple(shards))
            self.carrier = Carrier(
                around.all_reduce_, packets, self.context.meter, seed, around.reduce_scatter_
            )
        ring = ShardRing(around, self.context.world_size, staged=self.context.staged, scatter_mean=compress)
        for name, unit in zip(self.unit_names, self.units, strict=True):
            unit.set_custom_reduce_scatter(RingReduceScatter(ring, name))  # type: ignore[arg-type]  # of its shape
            unit.set_custom_all_gather(RingAllGather(ring))  # type: ignore[arg-type]
            unit.set_gradient_divide_factor(1.0)  # the ring takes the mean itself
            unit.set_force_sum_reduction_for_comms(True)
        for unit, following in pairwise(self.units):  # its parameters travel while this one computes
            unit.set_modules_to_forward_prefetch([following])
        return ring

    def watch_noise(self, noise: GradientNoise) -> None:
        """Whole gradients are seen only where they are about to be cut."""
        assert self.ring is not None
        self.ring.look_at = noise.look_at

    def _compress(self, unit: str, flat: Tensor, out: Tensor) -> None:
        """This rank's share of the mean over its shard group, divided for the sum over the replicas to come."""
        assert self.compressor is not None
        bucket = Bucket([unit], [flat.shape], flat, self.context.meter.step, self.exchanged)
        self.compressor.scatter_mean(bucket, self.carrier, out)
        if self.settings.replicas > 1:
            out.div_(self.settings.replicas)

    def _sum_over_shards(self, squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=self.shard_group)
        return squares

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        held = super().held(optimizer)
        rings = [] if self.ring is None else self.ring.ring.work_space
        return {**held, "buffers": [*held["buffers"], *rings]}

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Inside, gradients are reduce-scattered as ever, for a rank holds only shards of them; the rest can wait.

        Replicas exchange the sum of all micro-batches once, and parameters that stay gathered are not freed.
        """
        self._set_last(False)
        yield
        self._set_last(True)
        self.exchanged += 1

    # What error feedback keeps lies like the buffers that are reduce-scattered.

    @property
    def layout(self) -> str:
        """Ends in the number of shards."""
        return f"{self.name} {self.context.world_size} {SHARDS}{dist.get_world_size(self.shard_group)}"

    def recut(self, state: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
        """Cut anew for this number of shards, or out of what another kind of strategy has kept by parameter."""
        units, new = units_with_parameters(self.model), dist.get_world_size(self.shard_group)
        old = shards_of(layout)
        whole = state if old is None else by_parameter(state, units, old)
        return by_unit(whole, units, new)

    def _set_last(self, is_last: bool) -> None:
        for unit in self.units:
            unit.set_requires_all_reduce(is_last, recurse=False)
            if self.keeps_gathered:
                unit.set_reshard_after_backward(is_last, recurse=False)

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        optimizer: torch.optim.Optimizer,
    ) -> StepResult:
        for piece in self.pieces:
            piece.whole.grad = None
        if self.ring is not None:  # a gradient that is added to another must be there
            self.exchanged = 0
            self.ring.deferred = len(micro_batches) == 1 and self.settings.replicas == 1
        return super().step(micro_batches, loss_function, optimizer)

    def finish_exchange(self) -> None:
        if self.ring is not None:
            self.ring.finish()
        for piece in self.pieces:
            piece.parameter.data = local(piece.whole.detach())  # offloading moves it before the first step
            piece.parameter.grad = None if piece.whole.grad is None else local(piece.whole.grad)

    @contextmanager
    def evaluating(self) -> Iterator[Predict]:
        with super().evaluating() as predict:
            yield predict
        for unit in self.units:
            unit.reshard()  # what a forward pass without a backward has left gathered would go stale

    def full_parameters(self) -> dict[str, Tensor]:
        for unit in self.units:
            unit.unshard()
        whole = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for unit in self.units:
            unit.reshard()
        return whole

    def join(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As DTensors, cut like the parameters: nothing is gathered."""
        return {piece.name: _like(piece.whole, parts[piece.name]) for piece in self.pieces}

    def part(self, piece: Piece, whole: Tensor) -> Tensor:  # noqa: ARG002 - the DTensor knows
        return local(whole)


def _like(whole: nn.Parameter, part: Tensor) -> Tensor:
    assert isinstance(whole, DTensor)
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _refuse_scalars(model: nn.Module, strategy: str) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise SpecError(
                f"parameter {name!r} is a single number, which strategy={strategy!r} cannot cut along its first "
                "dimension; give it the shape (1,), or use strategy='zero-1'"
            )
