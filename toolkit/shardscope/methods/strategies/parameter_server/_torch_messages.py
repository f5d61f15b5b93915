"""Messages between workers and servers: a header of 24 bytes, followed by the values of a shard.

A message contains all tensors of a shard as one flat tensor, so each push or pull is one message per server. Messages
are in CPU memory, because gloo's point-to-point operations require it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardscope.errors import ShardscopeError, SpecError
from shardscope.methods.strategies.parameter_server import ParameterServer
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.flat import views_of
from shardscope.training.meter import OBSERVING, Traffic

HEADER_BYTES = 24
"""Size of a header, in bytes: three float64 numbers, the kind of message and two values."""
TO_SERVER, TO_WORKER, SQUARES = (1 << 21) + 1, (1 << 21) + 2, (1 << 21) + 3
"""Message tags, distinct from the tags of the rings."""


class SilentPeer(ShardscopeError):
    """Error raised if a rank that is alive sends nothing for too long while other ranks wait for it."""


def wait_for(work: dist.Work, peer: str, patience_s: float, timeout_s: float) -> None:
    """Wait for a message from `peer`.

    Args:
        work: The pending receive.
        peer: Description of the sender, for the error message.
        patience_s: Seconds to wait.
        timeout_s: The job's `timeout_s`, for the error message.

    Raises:
        SilentPeer: The message did not arrive within `patience_s` seconds.
        RuntimeError: The peer, or this process, has closed the connection.
    """
    try:
        work.wait(timedelta(seconds=patience_s))
    except RuntimeError as error:
        if "Timed out" not in str(error):
            raise
        raise SilentPeer(
            f"{peer} sent nothing for {patience_s:g} s; check why it is slow, or raise timeout_s={timeout_s:g}"
        ) from error


class MessageKind(IntEnum):
    """Kind of a worker's message to a server; the header also has the worker's step and whether its gradient is finite.

    A push is answered with parameters after its gradient has been applied. A worker that pauses or ends is answered
    when all workers have paused or ended.
    """

    PUSH = 0
    PAUSE = 1
    END = 2

    def traffic_step(self, step: int) -> int:
        """Return the step towards which the traffic of the message counts; `OBSERVING` for a pause or an end."""
        return step if self is MessageKind.PUSH else OBSERVING


class AnswerKind(IntEnum):
    """Kind of a server's answer.

    With ``DONE``, the header also has the gradient norm and whether the update was skipped; with ``SYNCHRONIZED``, it
    has the step that all workers have finished. ``WORKER_ENDS`` tells a paused worker that another worker has ended.
    With ``DROPPED``, the gradient arrived after the update of its step, and the header has the step that the server has
    reached.
    """

    DONE = 0
    SYNCHRONIZED = 1
    WORKER_ENDS = 2
    DROPPED = 3


@dataclass(frozen=True)
class Shard:
    """The tensors that one server stores and updates."""

    index: int
    names: list[str]
    parameters: list[nn.Parameter]

    @property
    def num_elements(self) -> int:
        """Total number of elements in all tensors."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return self.parameters[0].dtype

    def views(self, flat: Tensor) -> list[Tensor]:
        """Split a flat tensor into views with the shapes of this shard's tensors."""
        return views_of(flat, self.parameters)


def cut_into_shards(model: nn.Module, spec: ParameterServer) -> list[Shard]:
    """Assign the trained parameters of `model` to the servers as whole tensors, balanced by size.

    Raises:
        SpecError: There are more servers than tensors, or the parameters have several dtypes.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if len({p.dtype for _, p in named}) > 1:
        formats = ", ".join(sorted({str(p.dtype) for _, p in named}))
        raise SpecError(f"the model's parameters are {formats}; a parameter server needs a single dtype")
    if spec.servers > len(named):
        raise SpecError(
            f"strategy.servers={spec.servers} is too many for a model with {len(named)} trained parameter tensors; "
            f"use at most {len(named)}"
        )
    held = spec.shards([p.numel() for _, p in named])
    return [
        Shard(index, [named[i][0] for i in indices], [named[i][1] for i in indices])
        for index, indices in enumerate(held)
    ]


class MessageBuffer:
    """Buffer for one message; `header` and `payload` are views of `bytes`.

    Args:
        num_elements: Number of elements in the payload.
        dtype: Dtype of the payload.
    """

    def __init__(self, num_elements: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.bytes = torch.zeros(HEADER_BYTES + num_elements * dtype.itemsize, dtype=torch.uint8)
        self.header = self.bytes[:HEADER_BYTES].view(torch.float64)
        self.payload = self.bytes[HEADER_BYTES:].view(dtype)

    @classmethod
    def of(cls, *header: float) -> MessageBuffer:
        """Return a message that consists of a header only."""
        message = cls()
        message.write(*header)
        return message

    def write(self, *header: float) -> None:
        """Set the header; missing values are 0."""
        self.header.zero_()
        for i, value in enumerate(header):
            self.header[i] = value

    def read(self) -> tuple[int, float, float]:
        """Return the header: the kind of message and two values."""
        kind, first, second = self.header.tolist()
        return int(kind), first, second


@dataclass
class MessageLink:
    """Sender and receiver of metered messages between the ranks of a group.

    Payloads are counted under a given name, and headers as ``server_control``. Sender and receiver both count a message
    towards the `step` of the worker whose gradient the message concerns, regardless of their own step.
    """

    group: MeteredProcessGroup

    def __post_init__(self) -> None:
        self._transport: dist.ProcessGroup = self.group.transport(torch.device("cpu"))

    def send(
        self, message: MessageBuffer, peer: int, tag: int, name: str | None = None, *, step: int
    ) -> dist.Work:
        """Send a message, or only its header. The message must not change until the returned work is done.

        Args:
            message: The message.
            peer: Rank of the receiver.
            tag: Message tag.
            name: Name under which the payload is counted; None to send only the header.
            step: Step towards which the traffic counts.
        """
        self._count("server_control", peer, HEADER_BYTES, is_message=name is None, step=step)
        if name is not None:
            self._count(name, peer, message.bytes.numel() - HEADER_BYTES, step=step)
        return self._transport.send([message.bytes if name else message.bytes[:HEADER_BYTES]], peer, tag)

    def post(self, message: MessageBuffer, peer: int, tag: int) -> dist.Work:
        """Post a receive for a message that is at most as large as `message`."""
        return self._transport.recv([message.bytes], peer, tag)

    def received(self, name: str | None, peer: int, num_bytes: int, *, step: int) -> None:
        """Count a message from `peer`: its header, and `num_bytes` of payload unless `name` is None."""
        meter = self.group.meter
        meter.count("server_control", Traffic(HEADER_BYTES, received_bytes=HEADER_BYTES), step=step)
        meter.log("server_control", "arrived", peer, HEADER_BYTES, step=step)
        if name is not None:
            meter.count(name, Traffic(num_bytes, received_bytes=num_bytes, calls=1), step=step)
            meter.log(name, "arrived", peer, num_bytes, step=step)

    def sum_over(self, ranks: Sequence[int], value: Tensor) -> Tensor:
        """Sum a small float64 tensor over `ranks`, which include this one; all ranks add in the same order."""
        own, others = self.group.rank(), [rank for rank in ranks if rank != self.group.rank()]
        rows = {rank: torch.empty_like(value, device="cpu") for rank in others}
        rows[own] = value.cpu()
        receives = [self._transport.recv([rows[rank]], rank, SQUARES) for rank in others]
        sends = [self._transport.send([rows[own]], rank, SQUARES) for rank in others]
        for work in [*receives, *sends]:
            work.wait()
        size = value.numel() * value.element_size()
        for rank in others:
            self._count("server_control", rank, size)
            self.group.meter.count("server_control", Traffic(received_bytes=size))
            self.group.meter.log("server_control", "arrived", rank, size)
        return sum((rows[rank] for rank in sorted(rows)[1:]), rows[min(rows)]).to(value.device)

    def abort(self) -> None:
        """Make all pending waits fail: this process's waits for messages, and its peers' waits for this process.

        gloo has no function for this, but it closes all connections when a wait times out.
        """
        peer = (self.group.rank() + 1) % self.group.size()
        nothing = self._transport.recv([torch.empty(1)], peer, SQUARES + 1)
        try:
            nothing.wait(timedelta(milliseconds=1))
        except RuntimeError:
            self.group.give_up()

    def _count(
        self, name: str, peer: int, num_bytes: int, *, is_message: bool = True, step: int | None = None
    ) -> None:
        traffic = Traffic(payload_bytes=num_bytes, calls=1)
        traffic.count_sent(peer, num_bytes)
        traffic.messages = int(is_message)
        self.group.meter.count(name, traffic, step=step)
        self.group.meter.log(name, "sent", peer, num_bytes, step=step)
