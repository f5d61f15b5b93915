"""The ranks of a tensor group, and the collectives that divided layers call in their passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.errors import SpecError
from shardscope.training import _compat
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.tensor.random_streams import use_rank_stream, use_shared_stream


class Message(NamedTuple):
    """A collective that a layer has called in a pass, or a message to the next rank of its group."""

    axis: str
    """The axis of the group."""
    op: str
    """The collective's name, such as ``all_reduce``; ``send`` is a message."""
    phase: str
    """``forward``, ``backward`` or ``weights``, as in `AxisMessage`; a backward pass may repeat the forward pass."""
    num_bytes: int
    """Size of the whole tensor."""
    is_fixed: bool = False
    """Whether its size does not depend on the batch, as that of gradients of parameters."""


_recorded: ContextVar[list[Message] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[list[Message]]:
    """Return a context manager in which layers list their collectives instead of calling them.

    Results then lack the other ranks' data, so use it only for passes of which shapes matter, not values.
    """
    messages: list[Message] = []
    token = _recorded.set(messages)
    try:
        yield messages
    finally:
        _recorded.reset(token)


def record(message: Callable[[str], Message]) -> bool:
    """List a collective of a phase if collectives are listed instead of called, and return whether they are."""
    messages = _recorded.get()
    if messages is None:
        return False
    messages.append(message("backward" if _compat.is_in_backward() else "forward"))
    return True


@dataclass(frozen=True, eq=False)
class TensorAxis:
    """The ranks of one tensor group; without a group, for tracing one rank's part of a model, nothing is sent.

    Attributes:
        size: Number of ranks in the group.
        rank: This rank within the group.
        group: The group; None if nothing is sent.
        draws: Whether layers draw random numbers in training, such as for dropout.
    """

    name: ClassVar[str] = "tensor"

    size: int
    rank: int = 0
    group: MeteredProcessGroup | None = None
    draws: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> Self:  # copies of a layer have the same ranks
        return self

    @property
    def first_rank(self) -> int:
        """The group's first rank, among the ranks of the job."""
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    # Within a pass.

    def sum_(self, tensor: Tensor, *, is_fixed: bool = False) -> None:
        """Sum an activation, or the gradient of one or of parameters, over the ranks, in place."""
        self._call(
            "all_reduce", tensor, lambda group: dist.all_reduce(tensor, group=group),
            is_fixed=is_fixed,
        )  # fmt: skip

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole sequences `(N, T, ...)` of which each rank has a part `(N, T / size, ...)`."""
        parts = part.new_empty((self.size, *part.shape))
        own = part.contiguous()
        if not self._call("all_gather", parts, lambda group: _compat.all_gather_single(parts, own, group)):
            parts.copy_(own)
        return torch.cat(parts.unbind(), 1)

    def reduce_scatter(self, terms: Tensor) -> Tensor:
        """Return this rank's part `(N, T / size, ...)` of the sum of the ranks' terms `(N, T, ...)`."""
        parts = torch.stack(self._parts(terms).unbind())
        own = torch.empty_like(parts[0])
        scatter = _compat.reduce_scatter_single
        if not self._call("reduce_scatter", parts, lambda group: scatter(own, parts, group)):
            own.copy_(parts[self.rank])
        return own

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's part `(N, T / size, ...)` of the whole sequences `(N, T, ...)`; sends nothing."""
        return self._parts(whole)[self.rank].clone(memory_format=torch.contiguous_format)

    def _parts(self, whole: Tensor) -> Tensor:
        if whole.dim() < 2 or whole.shape[1] % self.size:
            raise SpecError(
                f"sequence_parallel=True divides the second dimension of a layer's input over tensor={self.size} "
                f"ranks, and its shape {tuple(whole.shape)} does not allow it; use sequences whose length is a "
                f"multiple of {self.size}, or sequence_parallel=False"
            )
        parts: Tensor = whole.unflatten(1, (self.size, -1))
        return parts.movedim(1, 0)

    def _call(
        self,
        op: str,
        whole: Tensor,
        call: Callable[[MeteredProcessGroup], Any],
        *,
        is_fixed: bool = False,
    ) -> bool:
        """Call a collective within a pass, which waits for it; return False if nothing was sent."""
        is_listed = record(lambda phase: Message(self.name, op, phase, whole.nbytes, is_fixed))
        if is_listed or self.group is None:
            return False
        with self.group.meter.waiting(is_within_layer=True):
            call(self.group)
        return True

    def begin_divided(self, device: torch.device) -> None:
        """Let this rank draw its own random numbers from here on, in a forward pass of training."""
        if self.draws and _recorded.get() is None:
            use_rank_stream(self.rank, device)

    def end_divided(self, device: torch.device) -> None:
        """Let all ranks draw the same random numbers again, in a forward pass of training."""
        if self.draws and _recorded.get() is None:
            use_shared_stream(device)

    # Outside the passes; never recorded.

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of a vector over the ranks."""
        dist.all_reduce(numbers, group=self.group)
        return numbers

    def largest_(self, flag: Tensor) -> None:
        """Replace a flag with its maximum over the ranks, in place."""
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)

    def of_all_ranks(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape and dtype, in the order of the ranks."""
        own = part.detach().contiguous().view(-1).view(torch.uint8)  # not every backend can send every dtype
        received = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(received, own, group=self.group)
        return [each.view(part.dtype).view(part.shape) for each in received]
