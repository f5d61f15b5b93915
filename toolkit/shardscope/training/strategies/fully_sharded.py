"""Base class of ZeRO-2 and ZeRO-3: PyTorch's `fully_shard` (FSDP2) on every block, with Shardscope's ring collectives.

Each block of the model is a sharding unit. The root unit has all other parameters: embeddings, norms, heads, and
parameters that several blocks share. Parameters become DTensors that are split along their first dimension, padded to a
multiple of the number of ranks. The optimizer updates the shards, and norms are summed over the ranks that have the
other shards. A scalar or empty parameter cannot be split; it stays whole on every rank, and its gradient is averaged at
the end of the step. So does a parameter that several stages of a pipeline share on one of its ranks.

Where ranks share memory, `SharedShards` takes the place of the ring, unless the job needs messages: for an emulated
link or latency, for compression or for replicas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardscope.runlog.axes import EXPERT_DATA
from shardscope.training._compat import (
    FsdpUnit,
    fsdp_modules,
    fsdp_units,
    gather_for_views,
    holds_parameters,
    label_while_profiling,
    reduce_gradients,
    report_gradients,
    reuse_compile_guards,
    skip_prefetch,
    stock_collectives,
)
from shardscope.training.collectives.agreement import Agreement, Purpose
from shardscope.training.collectives.packets import Packets
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.collectives.ring import RingAllReduce
from shardscope.training.collectives.sender import Sender
from shardscope.training.collectives.sharded import (
    RingAllGather,
    RingReduceScatter,
    ShardRing,
    StockAllGather,
    StockReduceScatter,
)
from shardscope.training.collectives.shared_shards import (
    SharedAllGather,
    SharedReduceScatter,
    SharedShards,
)
from shardscope.training.compression import Bucket, Carrier
from shardscope.training.data import call
from shardscope.training.gradient_noise import GradientNoise
from shardscope.training.memory import Held
from shardscope.training.mesh import replica_mesh
from shardscope.training.models import units_of
from shardscope.training.observe import random_state_kept
from shardscope.training.sharding import largest_over_ranks, local
from shardscope.training.strategies._outside_reads import blocks_read_outside, explaining_reads
from shardscope.training.strategies._relayout import (
    LEFT,
    ROOT,
    SHARDS,
    by_unit,
    can_be_cut,
    units_with_parameters,
)
from shardscope.training.strategies._replaced import following_tied, refusing_strays
from shardscope.training.strategies._unit_boundary import UnitBoundary
from shardscope.training.strategies.base import LossFunction, MicroBatch, Named, Predict
from shardscope.training.strategies.partitioned import ParameterShare, Partitioned
from shardscope.training.tensor import recording
from shardscope.training.tensor.split import box_of
from shardscope.training.transports.cuda_ipc import CudaMemory, DeviceShardBuffers
from shardscope.training.transports.shm import CannotShare, ShardBuffers

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


_SEED_STRIDE = 7919
_SHARED = "shards go through shared buffers, and are counted as the messages of a ring"


class FullySharded(Partitioned):
    """Base class of ZeRO-2 and ZeRO-3, which differ only in `keeps_gathered`."""

    lockstep = True
    keeps_gathered: ClassVar[bool]
    """Whether parameters stay gathered from the forward pass to the end of the last micro-batch's backward pass."""
    exchanged = 0
    """Number of micro-batches in this step whose gradients have been exchanged."""
    is_adopted = False
    """Whether another object runs the passes, possibly those of several micro-batches in turn."""

    def setup(self, model: nn.Module) -> nn.Module:
        self.read_outside = self._find_reads(model)
        return super().setup(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        self._shard([model], {name for name, _ in self.own_parameters(model)})
        return model

    def take(self, named: Sequence[Named], roots: Sequence[nn.Module]) -> None:
        self.read_outside, self.is_adopted = [], True  # FSDP2's own error explains a read outside a unit
        self._shard(roots, {name for name, _ in named})
        self._hold()

    def before_backward(self, root: nn.Module, *, is_split: bool) -> None:
        if is_split:  # torch looks for the unsharded parameters, and FSDP2 does not know of these passes
            for unit in fsdp_modules(root):
                unit.unshard()

    def after_backward(
        self, root: nn.Module, *, has_weights: bool, is_last: bool, is_followed: bool = False
    ) -> None:
        """Reduce-scatter the gradients after each micro-batch, because a rank has memory only for its shards."""
        frees = is_last or not (self.keeps_gathered or is_followed)
        if has_weights:
            reduce_gradients(root, reshards=frees)
        elif frees:
            for unit in fsdp_modules(root):
                unit.reshard()

    def _shard(self, roots: Sequence[nn.Module], own: Collection[str]) -> None:
        """Shard the units of all roots, and set this rank's pieces of its `own` parameters of the model."""
        for root in roots:  # FSDP2 accepts only contiguous parameters, so not channels_last
            for parameter in root.parameters():
                parameter.data = parameter.data.contiguous()
        mesh, self.roots = self._mesh(), roots
        self.shard_group = mesh.get_group(mesh.ndim - 1)
        with refusing_strays(self.model, self.name), following_tied(self.model, roots):
            units = [each for root in roots for each in self._units_of(root, mesh, own)]
        self.unit_names, self.units = [name for name, _ in units], [unit for _, unit in units]
        group = self.context.group
        assert group is not None
        self.sender = Sender("shards")
        self.agreement = Agreement(group, self.sender, self.name, self._place)
        self.ring = self._make_ring(group) if self.settings.collectives == "ring" else None
        self.shared = None if self.ring is None else self._make_shared(self.ring)
        self._replace_collectives()
        self.pieces = [
            ParameterShare(name, parameter, nn.Parameter(local(parameter.detach())))
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and name in own
        ]
        self.uncut = [piece for piece in self.pieces if not isinstance(piece.whole, DTensor)]
        if dist.get_rank(self.shard_group):  # only the first rank of the group counts their gradients
            self.duplicate_grad_params = [piece.parameter for piece in self.uncut]
        self.reduce_squares = self.reduce_grad_square = self._sum_over_shards
        self.copies_of_gradients = self.settings.replicas

    @property
    def _is_on_gpu(self) -> bool:
        return self.context.device.type == "cuda"

    def _mesh(self) -> DeviceMesh:
        """Return a one-dimensional device mesh of the ranks, or, with replicas, a mesh with one row per replica."""
        kind = self.context.device.type
        if self.settings.replicas > 1:
            return replica_mesh(self.context, self.settings.replicas, timeout_s=self.job.timeout_s)
        if self.context.axis is None:
            return init_device_mesh(kind, (self.context.world_size,))
        assert self.context.group is not None
        return DeviceMesh.from_group(self.context.group, kind)

    def _units_of(
        self, root: nn.Module, mesh: DeviceMesh, own: Collection[str]
    ) -> list[tuple[str, FSDPModule]]:
        """Shard a module's `own` parameters in place, and return its units by name, in the order of modules."""
        from torch.distributed.fsdp import (  # a slow import, needed only by these strategies
            CPUOffloadPolicy,
            FSDPModule,
            OffloadPolicy,
            fully_shard,
        )

        policy = CPUOffloadPolicy(pin_memory=self._is_on_gpu) if self.settings.offload else OffloadPolicy()
        cut = {
            p
            for name, p in self.model.named_parameters()
            if name in own and can_be_cut(p.shape) and name not in self.repeated
        }
        left = {p for p in root.parameters() if p not in cut}
        names = {module: name for name, module in self.model.named_modules()}
        made = dict.fromkeys([*units_of(root, besides=self.read_outside), root])
        for module in made:
            boundary = UnitBoundary(names.get(module) or ROOT, module, self.name)
            fully_shard(
                module, mesh=mesh, reshard_after_forward=not self.keeps_gathered, offload_policy=policy,
                ignored_params=left,
            )  # fmt: skip
            boundary.surround()
        return [(names.get(m) or ROOT, m) for m in root.modules() if m in made and isinstance(m, FSDPModule)]

    def _find_reads(self, model: nn.Module) -> list[str]:
        """Return the blocks that cannot be sharding units: those whose parameters any rank reads outside the block."""
        with random_state_kept(), self.precision.autocast(), recording():  # values do not matter
            found = blocks_read_outside(model, lambda twin: call(twin, self.example()[0]))
        flags = torch.tensor(list(found.values()), dtype=torch.uint8, device=self.context.device)
        if found:
            largest_over_ranks(flags, self.context.group)
        return [name for name, is_read in zip(found, flags.tolist(), strict=True) if is_read]

    def _accumulate(self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction) -> float | None:
        with explaining_reads(self.name):
            return super()._accumulate(micro_batches, loss_function)

    def _make_ring(self, group: MeteredProcessGroup) -> ShardRing:
        size = self.shard_group.size()
        first = self.context.rank // size * size  # ranks that share the parameters are neighbours
        shards = [*range(first, first + size)]
        around, packets, compress = RingAllReduce(group, members=shards), None, None
        if self.compressor is not None:  # each replica draws its own random numbers
            seed = self.job.seed + _SEED_STRIDE * (self.context.rank // len(shards))
            packets, compress = Packets(group, tuple(shards)), self._compress
            self.carrier = Carrier(
                around.all_reduce_, packets, self.context.meter, seed, around.reduce_scatter_
            )
        ring = ShardRing(
            around, self.context.world_size, agreement=self.agreement, sender=self.sender,
            device=self.context.device, is_staged=partial(self.context.is_staged, rounds=len(shards) - 1),
            scatter_mean=compress, packets=packets,
        )  # fmt: skip
        ring.crosses = self.settings.replicas > 1
        ring.gathers_in_backward = not self.keeps_gathered
        return ring

    def _make_shared(self, ring: ShardRing) -> SharedShards | None:
        """Return the collectives in shared memory; None if the job needs messages, or the ranks share no memory."""
        units = [group for unit in self.roots for group in fsdp_units(unit)]
        has_experts = self.of_experts is not None or self.context.axis == EXPERT_DATA
        self.why_ring = self.settings.why_ring(
            is_delayed=self.job.link is not None or self.context.is_paced,
            is_compressed=self.compressor is not None,
            has_frozen_units=not all(any(p.requires_grad for p in unit.parameters) for unit in units),
            has_experts=has_experts,
        )
        if not self.context.shares_memory or self.why_ring:
            return None
        buffers_of: Callable[..., ShardBuffers] = ShardBuffers
        if self._is_on_gpu:
            buffers_of = partial(DeviceShardBuffers, memory=CudaMemory(self.context.device))
        try:
            buffers = buffers_of(
                dist.PrefixStore("shards", self.agreement.store), self.context.rank, self.context.world_size,
                units=tuple(map(_gathered_bytes, units)), timeout_s=self.job.timeout_s,
                disagreed=self.agreement.raise_difference,
            )  # fmt: skip
        except CannotShare as error:  # on all ranks
            self.why_ring = str(error)
            return None
        return SharedShards(ring, buffers)

    def described_transport(self) -> dict[str, str]:
        described = super().described_transport()
        if self.shared is not None:
            described["transport_reason"] += f"; {_SHARED}"
        elif self.ring is not None and self.context.shares_memory:
            described["transport_reason"] += f"; shards go around a ring because {self.why_ring}"
        return described

    def _replace_collectives(self) -> None:
        """Replace FSDP2's collectives with collectives that also check that all ranks run the same operation."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, unit in zip(self.unit_names, self.units, strict=True):
            if not holds_parameters(unit):
                continue
            gather, reduce = self._collectives(name, unit)
            unit.set_custom_all_gather(gather)  # type: ignore[arg-type]  # of its shape
            unit.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
            reuse_compile_guards(unit)
            report_gradients(unit, names, reduce.set_names)
            gather_for_views(unit)
        label_while_profiling()
        if self.ring is None:
            return
        for unit in self.units:  # the ring computes the mean itself, so FSDP2 must only sum
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # no overlap with computation, passes in any order, or units of experts within those of blocks
        if self.shared is not None or self.is_adopted or self.of_experts is not None:
            for unit in self.units:
                skip_prefetch(unit)
            return
        for unit, following in pairwise(self.units):  # gathered while this unit computes
            unit.set_modules_to_forward_prefetch([following])

    def _collectives(
        self, name: str, unit: FSDPModule
    ) -> tuple[RingAllGather, RingReduceScatter] | tuple[StockAllGather, StockReduceScatter]:
        if self.shared is not None:
            return SharedAllGather(name, self.shared), SharedReduceScatter(name, self.shared)
        if self.ring is not None:
            return RingAllGather(name, self.ring), RingReduceScatter(name, self.ring)
        gather, reduce = stock_collectives(unit)
        return StockAllGather(name, self.agreement, gather), StockReduceScatter(name, self.agreement, reduce)

    def watch_noise(self, noise: GradientNoise) -> None:
        """Make the ring pass the unsharded gradients to `noise` just before it reduce-scatters them."""
        assert self.ring is not None
        self.ring.measure = noise.measure

    def _compress(self, unit: str, flat: Tensor, out: Tensor) -> None:
        """Write this rank's shard of the mean of the compressed gradients to `out`, divided by the number of replicas.

        The later sum over replicas then gives the mean over all ranks.
        """
        assert self.compressor is not None
        bucket = Bucket([unit], [flat.shape], flat, self.context.meter.step, self.exchanged)
        self.compressor.scatter_mean(bucket, self.carrier, out)
        if self.settings.replicas > 1:
            out.div_(self.settings.replicas)

    def _sum_over_shards(self, squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=self.shard_group)
        return squares

    @property
    def part_number(self) -> int:
        return dist.get_rank(self.shard_group)

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        held = super().held(optimizer)
        rings = [] if self.ring is None else self.ring.ring.work_space
        rings += [] if self.shared is None else self.shared.buffers.own
        return {**held, "buffers": [*held["buffers"], *rings]}

    def close(self) -> None:
        super().close()
        if self.shared is not None:
            self.shared.buffers.close()
        if not self.agreement.refused:  # otherwise the thread waits for a rank that never arrives
            self.sender.close()

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Return a context manager for the backward passes of all micro-batches but the last.

        Within it, gradients are still reduce-scattered, because a rank has memory only for its shards. The sum over
        replicas is deferred to the last micro-batch, and with `keeps_gathered` the parameters stay gathered.
        """
        self._set_last(False)
        with nullcontext() if self.of_experts is None else self.of_experts.no_exchange():
            yield
        self._set_last(True)
        self.exchanged += 1

    # Error-feedback residuals have the layout of the buffers that FSDP2 reduce-scatters.

    @property
    def layout(self) -> str:
        """Name of the layout, which ends with the number of shards."""
        left = f"{LEFT}{json.dumps(self.read_outside)} " if self.read_outside else ""
        return f"{self.name} {self.context.world_size} {left}{SHARDS}{dist.get_world_size(self.shard_group)}"

    def reshard_compressor_state(self, state: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
        """Convert compressor state to this number of shards, from a different number or from state by parameter."""
        units = units_with_parameters(self.model, besides=self.read_outside)
        whole = super().reshard_compressor_state(state, layout)
        return by_unit(whole, units, dist.get_world_size(self.shard_group))

    def _set_last(self, is_last: bool) -> None:
        if self.ring is not None:
            self.ring.crosses = is_last and self.settings.replicas > 1
        for unit in self.units:
            unit.set_requires_all_reduce(is_last, recurse=False)
            if self.keeps_gathered:
                unit.set_reshard_after_backward(is_last, recurse=False)

    def begin_step(self, optimizer: torch.optim.Optimizer, num_micro_batches: int) -> None:
        super().begin_step(optimizer, num_micro_batches)
        for piece in self.pieces:
            piece.whole.grad = None
        self.exchanged = 0
        if (
            self.ring is not None
        ):  # a reduce-scatter cannot be deferred if FSDP2 adds, sums or copies its result
            copies = self.settings.offload and self._is_on_gpu
            self.ring.deferred = num_micro_batches == 1 and self.settings.replicas == 1 and not copies
        if self.shared is not None:  # only a ring's messages can be shown one by one
            meter = self.context.meter
            self.shared.is_on = not meter.logged_step or meter.step != meter.logged_step

    def _place(self) -> str:
        """Return a description of the current micro-batch and step, for error messages."""
        if not self.model.training:
            return f"the evaluation after step {self.context.meter.step}"
        return f"micro-batch {self.exchanged + 1} of step {self.context.meter.step}"

    @torch.no_grad()  # reading the shard of a DTensor is cheaper without autograd
    def finish_exchange(self) -> None:
        if self.is_adopted and not self.units:  # a stage without experts
            return
        uncut = [piece for piece in self.uncut if piece.whole.grad is not None]
        self._settle(Purpose("exchanges no more layers", names=tuple(piece.name for piece in uncut)))
        _average([piece.whole.grad for piece in uncut if piece.whole.grad is not None], self.context.group)
        for piece in self.pieces:
            shard = local(piece.whole)
            if shard.data_ptr() != piece.parameter.data_ptr():  # FSDP2's offloading may have moved the shard
                piece.parameter.data = shard.detach()
            piece.parameter.grad = None if piece.whole.grad is None else local(piece.whole.grad)

    def _settle(self, purpose: Purpose) -> None:
        """Wait until all gradients are reduced, and check that all ranks have used the same layers."""
        if self.shared is not None and self.shared.is_on:
            self.shared.settle(purpose)
            return
        if self.ring is not None:
            self.ring.finish()
        self.agreement.require(purpose)

    @contextmanager
    def evaluating(self) -> Iterator[Predict]:
        with super().evaluating() as predict, explaining_reads(self.name):
            yield predict
        self.free_gathered()

    def free_gathered(self) -> None:
        super().free_gathered()
        for unit in self.units:
            unit.reshard()  # without a backward pass, the parameters stay gathered, and would not see the next update

    def full_parameters(self) -> dict[str, Tensor]:
        of_experts = self.of_experts.units if isinstance(self.of_experts, FullySharded) else []
        for unit in (*self.units, *of_experts):
            unit.unshard()
        whole = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for unit in (*self.units, *of_experts):
            unit.reshard()
        return self.joined(whole)

    def join(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return DTensors that are sharded as the parameters are; nothing is gathered."""
        wholes = {piece.name: piece.whole for piece in self.pieces}
        return {name: _like(wholes[name], part) for name, part in parts.items()}

    def empty(self, piece: ParameterShare, dtype: torch.dtype) -> Tensor:
        return _like(piece.whole, torch.empty_like(piece.parameter, dtype=dtype))

    def part(self, piece: ParameterShare, whole: Tensor) -> Tensor:
        return local(whole) if isinstance(whole, DTensor) else box_of(piece.whole, whole)


def _gathered_bytes(unit: FsdpUnit) -> int:
    """Return the size of a unit's gathered parameters, with FSDP2's padding, in bytes."""
    ranks = unit.num_shards
    padded = (-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in unit.shapes)
    return sum(padded) * max(unit.gathered_element_bytes, unit.reduced_element_bytes)


def _like(whole: nn.Parameter, part: Tensor) -> Tensor:
    if not isinstance(whole, DTensor):  # the parameter is not sharded
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _average(numbers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace each tensor with its mean over the ranks of the group, in place."""
    if any(number.numel() for number in numbers):
        flat = torch.cat([number.view(-1) for number in numbers]).double()
        dist.all_reduce(flat, group=group)
        means = flat.div_(dist.get_world_size(group)).split([number.numel() for number in numbers])
        for number, mean in zip(numbers, means, strict=True):
            number.copy_(mean.view(number.shape))
