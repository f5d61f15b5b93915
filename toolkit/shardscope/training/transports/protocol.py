"""Interface that a metered process group requires of the group that carries its communication."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


def timed_out(seconds: float) -> str:
    """Return the message of a wait that timed out, in gloo's words, which programs and torch's own tests search for."""
    return f"this rank waited too long: Timed out waiting {1000 * seconds:.0f}ms"


class Transport(Protocol):
    """A process group that carries messages and collectives.

    Messages are matched by their sender and tag, and may be posted in any order and from several threads. A send has
    finished when its tensor may be changed. Waiting for a rank that has ended, or for too long, raises a `RuntimeError`
    that `shardscope.runtime.record.secondary_failure` recognises; a rank that has waited for too long also ends the
    waits of the ranks that wait for it.

    Collectives are the methods of `dist.ProcessGroup` of the same names, such as `allreduce`.
    """

    def rank(self) -> int:
        """Return this rank within the group."""

    def size(self) -> int:
        """Return the number of ranks in the group."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work:
        """Send the only tensor in `tensors` to rank `dst`."""

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work:
        """Receive a message from rank `src` into the only tensor in `tensors`, which may be larger than the message."""

    def recv_anysource(self, tensors: list[Tensor], tag: int, /) -> dist.Work:
        """Receive a message from any rank."""

    def _get_backend(self, device: torch.device, /) -> Any:
        """Return the backend that sends messages of tensors on `device`, with the three methods above."""

    def shutdown(self) -> None:
        """Leave the group and release all resources."""

    def abort(self) -> None:
        """Make all waits of this rank, and all waits of other ranks for this rank, fail."""
