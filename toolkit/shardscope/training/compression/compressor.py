"""Compressors: how the ranks come to the mean of their gradients by way of something smaller.

A strategy has one `Compressor` a rank and asks it for the mean of a bucket (`mean_`, in the place of an all-reduce) or
for this rank's share of it (`scatter_mean`, in the place of a reduce-scatter). It brings a `Carrier`, its own way of
adding tensors up and the packets among its ranks. All ranks end with the same numbers, to the bit.

`packed.Packed` serves every method that is a `Codec`; methods that work otherwise have a compressor of their own.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from shardscope.errors import ShardscopeError
from shardscope.training.collectives.packets import Packets
from shardscope.training.compression.bucket import Bucket, tensor_of
from shardscope.training.compression.memory import Memory
from shardscope.training.meter import Meter
from shardscope.training.observe import StandIns


class NotFinite(ShardscopeError):
    """A gradient holds a NaN or an infinity, which compression cannot carry."""


@dataclass(frozen=True)
class Carrier:
    """What a strategy gives a compressor to communicate with; everything in CPU memory.

    Attributes:
        sum_: Sums a flat tensor of any number format over all ranks, in place, as the strategy does it.
        packets: Among the same ranks.
        meter: Spans of packing and unpacking go there, in the lane ``codec``.
        seed: The job's.
        scatter_sum: Sums a flat tensor of equal shares over all ranks; returns this rank's share, a view of it. Only
            strategies that hold gradients in shares have it.
    """

    sum_: Callable[[Tensor], Tensor]
    packets: Packets
    meter: Meter
    seed: int
    scatter_sum: Callable[[Tensor], Tensor] | None = None

    @property
    def world_size(self) -> int:
        """Ranks whose gradients meet."""
        return self.packets.world_size

    @property
    def rank(self) -> int:
        """This one's place among them."""
        return self.packets.index


class Owed(NamedTuple):
    """What one rank owes of one tensor, or of the unit of sharding that it is packed in.

    Attributes:
        kind: ``residual`` of its own gradient, ``share`` of the mean, or ``unsent`` under deep gradient compression.
        layer: The name of the tensor or unit.
        owed: Norm of what is still to be sent, after the step.
        gradient: Norm of what the step brought: the gradient, under 1-bit methods the first moment, each in the units
            it is packed in, under deep gradient compression its momentum. Of several exchanges in a step, the root of
            the sum of their squares.
    """

    kind: str
    layer: str
    owed: float
    gradient: float


class Compressor(ABC):
    """Base: one rank's side of one method."""

    freezes_variance: ClassVar[bool] = False
    """Whether the optimizer must be one whose second moment can be frozen."""

    def attach(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Called once, before the first step: what will update the parameters, which come by the names in buckets."""

    def begin_step(self, step: int) -> None:
        """Called on every rank before the first bucket of a step."""

    @abstractmethod
    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        """Replace ``bucket.flat`` by the mean over all ranks, as far as it gets through.

        Raises:
            NotFinite: It holds a NaN or an infinity.
        """

    def scatter_mean(self, bucket: Bucket, carrier: Carrier, out: Tensor) -> None:  # noqa: ARG002
        """This rank's share of the mean goes to `out`; the bucket is of as many equal shares as there are ranks.

        Only methods of the kinds ``sums`` and ``packets`` are asked; ``bucket.flat`` may be left as scratch.

        Raises:
            NotFinite: The bucket holds a NaN or an infinity.
        """
        raise AssertionError(f"{type(self).__name__} has no shares: the job's checks let it through")

    # Where one rank packs and another unpacks; asked of the same kinds.

    def num_bytes(self, num_elements: int) -> int:  # noqa: ARG002
        """Of the packet of a bucket with this many elements."""
        raise AssertionError(f"{type(self).__name__} has no packets: the job's checks let it through")

    def pack(self, bucket: Bucket, carrier: Carrier) -> Tensor:  # noqa: ARG002
        """This rank's packet of the whole bucket and of what it remembers beside it.

        Raises:
            NotFinite: The bucket holds a NaN or an infinity.
        """
        raise AssertionError(f"{type(self).__name__} has no packets: the job's checks let it through")

    def unpack(
        self,
        packet: Tensor,  # noqa: ARG002
        bucket: Bucket,  # noqa: ARG002
        carrier: Carrier,  # noqa: ARG002
        *,
        sender: int,  # noqa: ARG002
        add: bool = False,  # noqa: ARG002
    ) -> None:
        """What `sender` packed of its bucket of these names in this step goes to ``bucket.flat``, in float32."""
        raise AssertionError(f"{type(self).__name__} has no packets: the job's checks let it through")

    def forget(self) -> None:
        """Remember nothing from here on: for strategies in which what a packet leaves out is sent later anyway."""

    def conclude_(self, mean: Tensor, step: int) -> None:
        """Make a mean of unpacked packets the method's result; it is as it is, unless they were votes."""

    def after_step(self, parameters: Sequence[nn.Parameter], carrier: Carrier, step: int) -> None:
        """Called on every rank after each update, for methods that exchange something else than gradients."""

    def averaged(self, carrier: Carrier) -> StandIns:  # noqa: ARG002
        """Parameters that the ranks train apart, and the mean over all ranks for each; called on every rank."""
        return {}

    def warmup_ends(self, after: int) -> int | None:  # noqa: ARG002
        """The last step of an uncompressed warm-up in a run resumed `after` a step; None for methods without one."""
        return None

    @property
    def is_compiled(self) -> bool:
        """Whether it packs by compiled loops, which the run's start event says."""
        return False

    @property
    def memories(self) -> Sequence[Memory]:
        """What it remembers gradients in."""
        return ()

    def watch(self, is_on: bool) -> None:
        """Called before a step: whether `owed` will be asked for after it."""
        for memory in self.memories:
            memory.watch(is_on)

    @property
    def owed(self) -> list[Owed]:
        """What is owed after a watched step, beside what the step brought."""
        return [
            Owed(kind, name, math.sqrt(square), math.sqrt(memory.seen[name]))
            for memory in self.memories
            if memory.seen
            for kind, kept in memory.owed.items()
            for name, square in kept.squares.items()
            if name in memory.seen
        ]

    @property
    def figures(self) -> dict[str, float]:
        """What is worth watching, by name: norms of residuals, bits, ranks. Written to the run's events."""
        return {}

    @property
    def plan(self) -> dict[str, int]:
        """Bits or ranks in force by layer, for methods that move them; written to the run's events when they move."""
        return {}

    @property
    def work_space(self) -> list[Tensor]:
        """Tensors kept from step to step, for counting memory."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank must find again after a restart, by name."""
        return {}

    def merge(self, states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Out of the states of all ranks of an earlier run, the one that each rank of another number goes on with.

        It is their mean, so that what is owed to the mean gradient stays the same; integers are equal on all ranks.
        """
        total: dict[str, Tensor] = {}
        count = 0
        for state in states:
            count += 1
            for name, tensor in state.items():
                if name not in total:
                    total[name] = tensor.clone()
                elif tensor.is_floating_point():
                    total[name] += tensor
        return {name: t.div_(count) if t.is_floating_point() else t for name, t in total.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""


def refuse_not_finite(bucket: Bucket, method: str, *, in_float32: bool = True) -> None:
    """Refuse NaN and infinities, naming whose gradient holds them; and what becomes infinite in float32.

    Raises:
        NotFinite: There is one.
    """
    if not bucket.flat.numel():
        return
    is_wider = in_float32 and bucket.flat.dtype == torch.float64
    if torch.isfinite(bucket.flat.abs().max().float() if is_wider else bucket.flat.sum()):
        return
    for name, view in bucket.views(bucket.flat).items():
        if not torch.isfinite(view).all():
            raise NotFinite(
                f"the gradient of {name!r} is not finite at step {bucket.step}, which compression={method!r} cannot "
                "carry; lower the learning rate, warm up longer, or set clip_norm"
            )
        if is_wider and not torch.isfinite(view.float()).all():
            raise NotFinite(
                f"the gradient of {name!r} is beyond float32 at step {bucket.step}, in which compression={method!r} "
                "packs it; lower the learning rate, warm up longer, or set clip_norm"
            )


def refuse_out_of_range(unpacked: Bucket, method: str, way_out: str) -> None:
    """Refuse infinities that packing has made of finite gradients, or of their sum.

    Raises:
        NotFinite: There is one.
    """
    for name, view in unpacked.views(unpacked.flat).items():
        if not torch.isfinite(view).all():
            raise NotFinite(
                f"the gradient of {tensor_of(name)!r} is beyond the range of compression={method!r} at step "
                f"{unpacked.step}; {way_out}"
            )


def seed_of(job_seed: int, step: int, names: Sequence[str], rank: int | None) -> int:
    """A seed for one bucket of one step: the same on every repetition; on every rank too where `rank` is None."""
    text = f"{job_seed}/{step}/{names[0]}/{len(names)}/{'all' if rank is None else rank}"
    return zlib.crc32(text.encode())
