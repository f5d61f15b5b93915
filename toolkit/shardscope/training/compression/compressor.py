"""Compressors: average the gradients of all ranks by exchanging compressed messages.

A strategy has one `Compressor` per rank. The strategy calls `mean_` on a bucket instead of an all-reduce, or
`scatter_mean` instead of a reduce-scatter. It passes a `Carrier`, through which the compressor communicates: the
strategy's own sum over ranks, and exchanges of packets. All ranks end with bitwise identical values.

`packed.Packed` is the compressor for every method that defines a `Codec`; other methods have their own compressor.
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
    """Error for a gradient with a NaN or an infinity, which the compression method cannot represent."""


@dataclass(frozen=True)
class Carrier:
    """Communication functions that a strategy passes to a compressor; all tensors are in CPU memory.

    Attributes:
        sum_: Function that sums a flat tensor of any dtype over all ranks, in place, by the strategy's collective
            algorithm.
        packets: Exchanges packets among the same ranks.
        meter: Meter that records the time spans of packing and unpacking, in the lane ``codec``.
        seed: The job's seed.
        scatter_sum: Reduce-scatter: function that sums a flat tensor over all ranks and returns this rank's share, one
            of `world_size` equal parts, as a view of the tensor. Set only by strategies that shard gradients.
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
        """Index of this rank among the ranks whose gradients are averaged, from 0."""
        return self.packets.index


class ResidualNorms(NamedTuple):
    """Norm of one rank's residual for one tensor or sharding unit, and the norm of the compressor's input.

    Attributes:
        kind: ``residual`` for the residual of the rank's own gradient, ``share`` for the residual of its
            share of the mean, ``unsent`` for the values that deep gradient compression has not sent yet.
        layer: The name of the tensor or sharding unit.
        norm: Norm of the residual after the step.
        gradient: Norm of the compressor's input in the step, in the same units as the residual: the gradient; under
            1-bit methods, the first moment; under deep gradient compression, the momentum. If the step has several
            exchanges, the square root of the sum of their squared norms.
    """

    kind: str
    layer: str
    norm: float
    gradient: float


class Compressor(ABC):
    """Base class of compressors: applies a compression method on one rank."""

    freezes_variance: ClassVar[bool] = False
    """Whether the method freezes the optimizer's second moment, and so needs an optimizer that supports it."""

    def attach(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Receive the optimizer and its parameters; called once, before the first step.

        Args:
            optimizer: The optimizer of this rank.
            parameters: The parameters, by the name that each has in a `Bucket`.
        """

    def begin_step(self, step: int) -> None:
        """Prepare for a training step; called on every rank before the first bucket of the step."""

    @abstractmethod
    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        """Replace ``bucket.flat`` with the compressed approximation of its mean over all ranks.

        Raises:
            NotFinite: The bucket contains a NaN or an infinity.
        """

    def scatter_mean(self, bucket: Bucket, carrier: Carrier, out: Tensor) -> None:  # noqa: ARG002
        """Write this rank's share of the mean gradient to `out`.

        Called only for methods whose `carriage` is ``"sums"`` or ``"packets"``.

        Args:
            bucket: The bucket, divided into one share of the same size per rank; ``bucket.flat`` may be overwritten.
            carrier: The strategy's communication functions.
            out: The output: a flat tensor of the size of one share.

        Raises:
            NotFinite: The bucket contains a NaN or an infinity.
        """
        raise AssertionError(
            f"{type(self).__name__} does not define scatter_mean; the job's checks should have rejected this method"
        )

    # The next three are for strategies where one rank packs and another unpacks; `carriage` as for `scatter_mean`.

    def num_bytes(self, num_elements: int) -> int:  # noqa: ARG002
        """Return the size in bytes of the packet for a bucket with `num_elements` elements."""
        raise AssertionError(
            f"{type(self).__name__} does not define num_bytes; the job's checks should have rejected this method"
        )

    def pack(self, bucket: Bucket, carrier: Carrier) -> Tensor:  # noqa: ARG002
        """Return this rank's packet of the whole bucket, including the rank's residual.

        Raises:
            NotFinite: The bucket contains a NaN or an infinity.
        """
        raise AssertionError(
            f"{type(self).__name__} does not define pack; the job's checks should have rejected this method"
        )

    def unpack(
        self,
        packet: Tensor,  # noqa: ARG002
        bucket: Bucket,  # noqa: ARG002
        carrier: Carrier,  # noqa: ARG002
        *,
        sender: int,  # noqa: ARG002
        add: bool = False,  # noqa: ARG002
    ) -> None:
        """Unpack a packet into ``bucket.flat``, a float32 tensor.

        Args:
            packet: The packet that `sender` made of the same bucket in this step.
            bucket: The bucket to fill.
            carrier: The strategy's communication functions.
            sender: Rank that packed the packet.
            add: Whether to add the decoded values to ``bucket.flat`` instead of overwriting it.
        """
        raise AssertionError(
            f"{type(self).__name__} does not define unpack; the job's checks should have rejected this method"
        )

    def forget(self) -> None:
        """Stop keeping residuals; for strategies that track the compression error themselves."""

    def conclude_(self, mean: Tensor, step: int) -> None:
        """Convert a mean of decoded packets to the method's result, in place.

        By default the mean is the result. Methods in which each packet is a vote override this.
        """

    def after_step(self, parameters: Sequence[nn.Parameter], carrier: Carrier, step: int) -> None:
        """Exchange tensors other than gradients; called on every rank after each optimizer update."""

    def averaged(self, carrier: Carrier) -> StandIns:  # noqa: ARG002
        """Return the mean over all ranks of each parameter that the ranks train separately; called on every rank."""
        return {}

    def warmup_ends(self, after: int) -> int | None:  # noqa: ARG002
        """Return the last step of the uncompressed warm-up, or None for methods without one.

        Args:
            after: The step after which the run was resumed; 0 for a new run.
        """
        return None

    @property
    def is_compiled(self) -> bool:
        """Whether packing uses compiled loops; reported in the run's start event."""
        return False

    @property
    def memories(self) -> Sequence[Memory]:
        """The `Memory` objects that contain this compressor's residuals."""
        return ()

    def watch(self, is_on: bool) -> None:
        """Start or stop recording the norms of inputs; called before a step after which `residuals` may be read."""
        for memory in self.memories:
            memory.watch(is_on)

    @property
    def residuals(self) -> list[ResidualNorms]:
        """Norms of the residuals after a step with ``watch(True)``; otherwise empty."""
        return [
            ResidualNorms(kind, name, math.sqrt(square), math.sqrt(memory.seen[name]))
            for memory in self.memories
            if memory.seen
            for kind, kept in memory.residuals.items()
            for name, square in kept.squares.items()
            if name in memory.seen
        ]

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of the method by name, such as residual norms, bit widths and matrix ranks; written to the events."""
        return {}

    @property
    def plan(self) -> dict[str, int]:
        """Current bit width or matrix rank for each layer, in methods that adapt it; logged whenever it changes."""
        return {}

    @property
    def work_space(self) -> list[Tensor]:
        """Tensors kept from step to step; listed so that their memory is counted."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors to save in this rank's checkpoint, by name."""
        return {}

    def merge(self, states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Merge the checkpointed states of all ranks into one, for a run resumed with a different number of ranks.

        Every rank of the resumed run loads the merged state. Float tensors are averaged, so that the residual of the
        mean gradient stays the same. Integer tensors are equal on all ranks, and are copied.
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


def check_finite(bucket: Bucket, method: str, *, in_float32: bool = True) -> None:
    """Raise an error if the bucket has a value that is not finite; the message names the parameter.

    Args:
        bucket: The bucket to check.
        method: Name of the compression method, for the message.
        in_float32: Whether the values are converted to float32, so that float64 values must be in its range.

    Raises:
        NotFinite: The bucket contains a NaN, an infinity, or a float64 value beyond the range of float32.
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
                "represent; lower the learning rate, warm up longer, or set clip_norm"
            )
        if is_wider and not torch.isfinite(view.float()).all():
            raise NotFinite(
                f"the gradient of {name!r} is beyond the range of float32 at step {bucket.step}, and "
                f"compression={method!r} converts it to float32; lower the learning rate, warm up longer, or set "
                "clip_norm"
            )


def check_range(unpacked: Bucket, method: str, way_out: str) -> None:
    """Raise an error if packing or summing has turned finite gradients into infinities.

    Args:
        unpacked: A bucket whose `flat` holds decoded values.
        method: Name of the compression method, for the message.
        way_out: Advice for the user, for the message.

    Raises:
        NotFinite: The bucket contains a value that is not finite.
    """
    for name, view in unpacked.views(unpacked.flat).items():
        if not torch.isfinite(view).all():
            raise NotFinite(
                f"the gradient of {tensor_of(name)!r} is beyond the range of compression={method!r} at step "
                f"{unpacked.step}; {way_out}"
            )


def seed_of(job_seed: int, step: int, names: Sequence[str], rank: int | None) -> int:
    """Return the seed for one bucket in one step, which depends only on the arguments.

    Args:
        job_seed: The job's seed.
        step: The training step.
        names: The names of the bucket's tensors.
        rank: This rank, for a seed of its own; None for a seed that all ranks share.
    """
    text = f"{job_seed}/{step}/{names[0]}/{len(names)}/{'all' if rank is None else rank}"
    return zlib.crc32(text.encode())
