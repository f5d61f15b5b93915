"""Compressors: how the ranks compute the mean of their gradients from compressed messages.

A strategy has one `Compressor` per rank. It calls `mean_` for the mean of a bucket, instead of an all-reduce, or
`scatter_mean` for this rank's share of it, instead of a reduce-scatter. It passes a `Carrier` with its own way to sum
tensors and the packet exchanges among its ranks. All ranks end with bit-identical numbers.

`packed.Packed` serves every method that is a `Codec`; other methods have their own compressor.
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
    """The communication that a strategy offers a compressor; all tensors are in CPU memory.

    Attributes:
        sum_: Sums a flat tensor of any number format over all ranks, in place, with the strategy's algorithm.
        packets: Packet exchanges among the same ranks.
        meter: Records the spans of packing and unpacking, in the lane ``codec``.
        seed: The job's seed.
        scatter_sum: Sums a flat tensor of equal shares over all ranks and returns this rank's share, a view of it. Set
            only by strategies that shard gradients.
    """

    sum_: Callable[[Tensor], Tensor]
    packets: Packets
    meter: Meter
    seed: int
    scatter_sum: Callable[[Tensor], Tensor] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.packets.world_size

    @property
    def rank(self) -> int:
        """Index of this rank among them."""
        return self.packets.index


class Residual(NamedTuple):
    """One rank's residual of one tensor, or of the sharding unit that it is packed in.

    Attributes:
        kind: ``residual`` of its own gradient, ``share`` of the mean, or ``unsent`` under deep gradient compression.
        layer: The name of the tensor or unit.
        norm: Norm of the residual after the step.
        gradient: Norm of the step's input: the gradient, or the first moment under 1-bit methods, each in the units it
            is packed in; under deep gradient compression, its momentum. For several exchanges in a step, the root of
            the sum of their squares.
    """

    kind: str
    layer: str
    norm: float
    gradient: float


class Compressor(ABC):
    """Base class: one rank's side of a compression method."""

    freezes_variance: ClassVar[bool] = False
    """Whether the method needs an optimizer whose second moment can be frozen."""

    def attach(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Receive the optimizer and its parameters, by their names in buckets; called once, before the first step."""

    def begin_step(self, step: int) -> None:
        """Called on every rank before the first bucket of a step."""

    @abstractmethod
    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        """Replace ``bucket.flat`` by the mean over all ranks, as far as the compressed messages carry it.

        Raises:
            NotFinite: The bucket holds a NaN or an infinity.
        """

    def scatter_mean(self, bucket: Bucket, carrier: Carrier, out: Tensor) -> None:  # noqa: ARG002
        """Write this rank's share of the mean to `out`; the bucket has one share per rank, all of equal size.

        Called only for methods of the kinds ``sums`` and ``packets``. ``bucket.flat`` may be overwritten as scratch.

        Raises:
            NotFinite: The bucket holds a NaN or an infinity.
        """
        raise AssertionError(f"{type(self).__name__} has no shares: the job's checks let it through")

    # For strategies where one rank packs and another unpacks; called for the same kinds of methods.

    def num_bytes(self, num_elements: int) -> int:  # noqa: ARG002
        """Bytes of the packet of a bucket with `num_elements` elements."""
        raise AssertionError(f"{type(self).__name__} has no packets: the job's checks let it through")

    def pack(self, bucket: Bucket, carrier: Carrier) -> Tensor:  # noqa: ARG002
        """Return this rank's packet of the whole bucket plus its residual.

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
        """Unpack to ``bucket.flat``, in float32, the packet that `sender` made of the same bucket in this step."""
        raise AssertionError(f"{type(self).__name__} has no packets: the job's checks let it through")

    def forget(self) -> None:
        """Keep no residuals from here on: for strategies that send later what a packet leaves out."""

    def conclude_(self, mean: Tensor, step: int) -> None:
        """Turn a mean of unpacked packets into the method's result; it changes only where packets are votes."""

    def after_step(self, parameters: Sequence[nn.Parameter], carrier: Carrier, step: int) -> None:
        """Called on every rank after each update, for methods that exchange other tensors than gradients."""

    def averaged(self, carrier: Carrier) -> StandIns:  # noqa: ARG002
        """Map each parameter that the ranks train separately to its mean over all ranks; called on every rank."""
        return {}

    def warmup_ends(self, after: int) -> int | None:  # noqa: ARG002
        """The last step of an uncompressed warm-up in a run resumed `after` a step; None for methods without one."""
        return None

    @property
    def is_compiled(self) -> bool:
        """Whether it packs by compiled loops; the run's start event reports this."""
        return False

    @property
    def memories(self) -> Sequence[Memory]:
        """The memories that hold its residuals."""
        return ()

    def watch(self, is_on: bool) -> None:
        """Called before a step: whether `residuals` will be read after it."""
        for memory in self.memories:
            memory.watch(is_on)

    @property
    def residuals(self) -> list[Residual]:
        """Residuals after a watched step, each with the norm of the step's input."""
        return [
            Residual(kind, name, math.sqrt(square), math.sqrt(memory.seen[name]))
            for memory in self.memories
            if memory.seen
            for kind, kept in memory.residuals.items()
            for name, square in kept.squares.items()
            if name in memory.seen
        ]

    @property
    def figures(self) -> dict[str, float]:
        """Figures worth watching, by name: norms of residuals, bits, ranks. Written to the run's events."""
        return {}

    @property
    def plan(self) -> dict[str, int]:
        """Current bits or ranks by layer, for methods that adapt them; written to the run's events on change."""
        return {}

    @property
    def work_space(self) -> list[Tensor]:
        """Tensors kept from step to step, for counting memory."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        """State that this rank must restore on resume, by name."""
        return {}

    def merge(self, states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Merge the states of all ranks of an earlier run into the state that every rank of a new world size loads.

        It is their mean, so that the residual of the mean gradient stays the same; integers are equal on all ranks.
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
        """Load the state that `state_dict` returned."""


def refuse_not_finite(bucket: Bucket, method: str, *, in_float32: bool = True) -> None:
    """Refuse NaN, infinities, and values that become infinite in float32, naming the parameter.

    Raises:
        NotFinite: The bucket holds one of them.
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
        NotFinite: The bucket holds a value that is not finite.
    """
    for name, view in unpacked.views(unpacked.flat).items():
        if not torch.isfinite(view).all():
            raise NotFinite(
                f"the gradient of {tensor_of(name)!r} is beyond the range of compression={method!r} at step "
                f"{unpacked.step}; {way_out}"
            )


def seed_of(job_seed: int, step: int, names: Sequence[str], rank: int | None) -> int:
    """Seed for one bucket of one step: the same on every repetition, and on every rank too if `rank` is None."""
    text = f"{job_seed}/{step}/{names[0]}/{len(names)}/{'all' if rank is None else rank}"
    return zlib.crc32(text.encode())
