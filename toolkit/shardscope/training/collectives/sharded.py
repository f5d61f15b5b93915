"""Collectives for FSDP2: Shardscope's ring collectives, and FSDP2's own with a check of their order.

The reduce-scatter and the all-gather of `fully_shard` can be replaced (by `set_custom_reduce_scatter` and
`set_custom_all_gather`) by objects with two methods: `allocate`, which creates a buffer, and `__call__`, which
communicates. `ShardRing` implements both on a ring of the ranks that have the shards of a model. One thread per rank
sends all messages, in the order in which the collectives are called, while computation continues. This order must be
the same on every rank, or the ranks would deadlock; an `Agreement` checks it.

FSDP2 pads the first dimension of every parameter to a multiple of the number of ranks, so all chunks have the same
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training import clock
from shardscope.training.collectives.agreement import Agreement, Purpose
from shardscope.training.collectives.packets import Packets
from shardscope.training.collectives.ring import RingAllReduce
from shardscope.training.collectives.sender import Sender

ScatterMean = Callable[[str, Tensor, Tensor], None]
"""Function ``(unit_name, gradients, output)`` that averages flat gradients (a CPU tensor) over ranks and writes this
rank's chunk of the mean to ``output``."""


def _current_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager in which another thread uses this thread's current CUDA stream."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream(device))


class _Sent(dist.Work):
    """Handle of an asynchronous collective that FSDP2 waits for."""

    def __init__(self, future: Future[None], agreement: Agreement) -> None:
        super().__init__()
        self._future, self._agreement = future, agreement

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - FSDP2 gives none
        self._agreement.wait(self._future)
        return True


class ShardRing:
    """Reduce-scatter and all-gather on a ring of the ranks that have the shards of one model.

    Args:
        ring: The ring of these ranks.
        num_ranks: Number of ranks over which gradients are averaged; larger than the ring if the model has replicas.
        agreement: Checks that all ranks call the same collectives; it uses the same sending thread.
        sender: The thread that sends all messages.
        device: The device of all tensors.
        is_staged: Function from the size of a tensor in bytes to whether it is copied to CPU memory before it is sent.
        scatter_mean: Function that computes the mean if gradients are compressed; None to compute it with the ring.
        packets: Packet exchange that `scatter_mean` uses in addition to the ring.
    """

    def __init__(
        self,
        ring: RingAllReduce,
        num_ranks: int,
        *,
        agreement: Agreement,
        sender: Sender,
        device: torch.device,
        is_staged: Callable[[int], bool],
        scatter_mean: ScatterMean | None = None,
        packets: Packets | None = None,
    ) -> None:
        self.ring = ring
        self.num_ranks = num_ranks
        self.agreement = agreement
        self._is_staged = is_staged
        self._device, self._is_on_gpu = device, device.type == "cuda"
        self._scatter_mean = scatter_mean or self._add_up
        self.deferred = False
        """Whether `reduce_mean` may return before its reduce-scatter has finished; `finish` then waits for all of them.
        """
        self.gathers_in_backward = True
        """Whether the backward pass gathers parameters; a gather would wait behind gradients that are held back."""
        self.crosses = False
        """Whether, after the reduce-scatter, FSDP2 sums each gradient over replicas by the backend's all-reduce."""
        self.measure: Callable[[str, Tensor], None] | None = None
        """Function that is called with each unit's name and its unsharded gradients, padded with zeros, before they are
        reduced; None for no call."""
        self._sender = sender
        self._carriers: list[RingAllReduce | Packets] = [ring] if packets is None else [ring, packets]
        self._pending: list[Future[None]] = []

    def submit(self, purpose: Purpose, send: Callable[[], None]) -> Future[None]:
        """Run `send` on the sending thread, after all earlier tasks, with the message tags for `purpose`.

        On a GPU, `send` uses the stream of the caller, on which FSDP2 orders its copies before and after the
        collective.
        """
        tag, stream = self.agreement.tag(purpose), _current_stream(self._device)

        def carry_out() -> None:
            for carrier in self._carriers:
                carrier.tag = tag
            with stream:
                send()

        self.ring.group.meter.handed_over = clock.now()
        return self._sender.submit(carry_out)

    def reduce_mean(self, purpose: Purpose, output: Tensor, buffer: Tensor) -> None:
        """Average `buffer` over all ranks and write this rank's chunk of the mean to `output`; overwrites `buffer`."""
        unit = purpose.layer
        if self.measure is not None:
            self.measure(unit, buffer)

        def send() -> None:
            if not self.gathers_in_backward:
                self.ring.group.meter.hold_gradients()
            if self._is_staged(buffer.nbytes):
                own = torch.empty_like(output, device="cpu")
                self._scatter_mean(unit, buffer.cpu(), own)
                output.copy_(own)
            else:
                self._scatter_mean(unit, buffer, output)

        self._pending.append(self.submit(purpose, send))
        if not self.deferred or self._is_on_gpu:
            self.finish()

    def _add_up(self, unit: str, buffer: Tensor, output: Tensor) -> None:  # noqa: ARG002
        torch.div(self.ring.reduce_scatter_(buffer), self.num_ranks, out=output)

    def gather(self, purpose: Purpose, output: Tensor) -> dist.Work:
        """Fill `output` with the chunks of all ranks; it must already contain this rank's own chunk."""

        def send() -> None:
            if self._is_staged(output.nbytes):
                output.copy_(self.ring.all_gather_(output.cpu()))
            else:
                self.ring.all_gather_(output)

        sent = _Sent(self.submit(purpose, send), self.agreement)
        if self._is_on_gpu:  # FSDP2 then marks the end of the collective on its stream
            sent.wait()
        return sent

    def finish(self) -> None:
        """Wait until all reduce-scatters have finished; if one has failed, raise its error."""
        pending, self._pending = self._pending, []
        for future in pending:
            self.agreement.wait(future)


class _Comm:
    """Base class of the collectives that are passed to FSDP2.

    Args:
        unit: Name of the FSDP unit.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new, uninitialised buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def gathering(self, tensor: Tensor) -> Purpose:
        """Return the `Purpose` of an all-gather into `tensor` for this unit."""
        return Purpose("gathers the parameters of", self.unit, tensor.numel())


class _Reducing(_Comm):
    """Base class of the collectives that reduce a unit's gradients."""

    names: tuple[str, ...] = ()
    """Names of the unit's parameters that have a gradient."""

    def set_names(self, names: tuple[str, ...]) -> None:
        """Set the names of the unit's parameters that have a gradient; called before each reduce-scatter."""
        self.names = names

    def reducing(self, tensor: Tensor) -> Purpose:
        """Return the `Purpose` of a reduce-scatter of `tensor` for this unit."""
        return Purpose("reduces the gradients of", self.unit, tensor.numel(), self.names)


class RingReduceScatter(_Reducing):
    """Ring reduce-scatter for `FSDPModule.set_custom_reduce_scatter`.

    The collective computes the mean for any value of `op`, so FSDP2 must not divide the result.
    """

    def __init__(self, unit: str, ring: ShardRing) -> None:
        super().__init__(unit)
        self.ring = ring

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002
        op: Any,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        purpose = self.reducing(input_tensor)
        self.ring.reduce_mean(purpose, output_tensor, input_tensor)
        if self.ring.crosses:
            self.ring.agreement.require(purpose)


class RingAllGather(_Comm):
    """Ring all-gather for `FSDPModule.set_custom_all_gather`.

    The input must be a view of this rank's chunk of the output.
    """

    def __init__(self, unit: str, ring: ShardRing) -> None:
        super().__init__(unit)
        self.ring = ring

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,  # noqa: ARG002
        group: dist.ProcessGroup,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> dist.Work:
        return self.ring.gather(self.gathering(output_tensor), output_tensor)


class StockReduceScatter(_Reducing):
    """FSDP2's own reduce-scatter, preceded by a check that all ranks call it for the same unit.

    Without the check, the backend would combine the messages of ranks that call it for different units.

    Args:
        unit: Name of the FSDP unit.
        agreement: Checks that all ranks call the same collectives.
        stock: FSDP2's own collective.
    """

    def __init__(self, unit: str, agreement: Agreement, stock: Callable[..., Any]) -> None:
        super().__init__(unit)
        self.agreement, self.stock = agreement, stock

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        self.agreement.require(self.reducing(input_tensor))
        return self.stock(output_tensor, input_tensor, *args, **options)


class StockAllGather(_Comm):
    """FSDP2's own all-gather, preceded by a check that all ranks call it for the same unit."""

    def __init__(self, unit: str, agreement: Agreement, stock: Callable[..., Any]) -> None:
        super().__init__(unit)
        self.agreement, self.stock = agreement, stock

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        self.agreement.require(self.gathering(output_tensor))
        return self.stock(output_tensor, input_tensor, *args, **options)
