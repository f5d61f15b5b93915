"""The ranks of a tensor group, and the collectives that divided layers call in their passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training import _compat
from shardscope.training.collectives.process_group import MeteredProcessGroup


class Message(NamedTuple):
    """A collective that a layer has called in a pass, or a message to the next rank of its group."""

    op: str
    """The collective's name, such as ``all_reduce``; ``send`` is a message."""
    phase: str
    """``forward`` or ``backward``; a forward pass that a backward pass repeats counts as ``backward``."""
    num_bytes: int
    axis: str = "tensor"
    """The axis of the group."""


_recorded: ContextVar[list[Message] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[list[Message]]:
    """Return a context manager in which layers list their collectives instead of calling them.

    Values are then those of this rank's part only, so it is for passes that need shapes, not values.
    """
    messages: list[Message] = []
    token = _recorded.set(messages)
    try:
        yield messages
    finally:
        _recorded.reset(token)


def record(op: str, num_bytes: int, axis: str) -> bool:
    """List a collective if collectives are listed instead of called, and return whether they are."""
    messages = _recorded.get()
    if messages is None:
        return False
    phase = "backward" if _compat.is_in_backward() else "forward"
    messages.append(Message(op, phase, num_bytes, axis))
    return True


@dataclass(frozen=True, eq=False)
class TensorAxis:
    """The ranks of one tensor group; without a group, for tracing one rank's part of a model, nothing is sent.

    Attributes:
        size: Number of ranks in the group.
        rank: This rank within the group.
        group: The group; None if nothing is sent.
    """

    name: ClassVar[str] = "tensor"

    size: int
    rank: int = 0
    group: MeteredProcessGroup | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Self:  # copies of a layer have the same ranks
        return self

    @property
    def first_rank(self) -> int:
        """The group's first rank, among the ranks of the job."""
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    def sum_(self, tensor: Tensor) -> None:
        """Sum an activation, or the gradient of one, over the ranks, in place."""
        if not record("all_reduce", tensor.nbytes, self.name) and self.group is not None:
            with self.group.meter.waiting(is_within_layer=True):
                dist.all_reduce(tensor, group=self.group)

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of a vector over the ranks; not part of a pass, and never recorded."""
        dist.all_reduce(numbers, group=self.group)
        return numbers

    def largest_(self, flag: Tensor) -> None:
        """Replace a flag with its maximum over the ranks, in place."""
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape and dtype, in the order of the ranks."""
        own = part.detach().contiguous().view(-1).view(torch.uint8)  # not every backend can send every dtype
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.group)
        return [each.view(part.dtype).view(part.shape) for each in every]
