"""Messages of tensors on a device: the data are in the sender's arena; a message in shared memory has their location.

A send copies its tensor to the arena of its rank, so it has finished when it returns. The receiver copies from there
and acknowledges, and the sender then reuses the space. Both ranks wait on the host until the device has copied, so they
need no common stream.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.transports.cuda_ipc.memory import SEGMENT_BYTES, Arena, DeviceMemory
from shardscope.training.transports.shm.messages import Mailbox, Message
from shardscope.training.transports.shm.peers import Peers

_DRAIN_S = 5.0
_POLL_S = 0.002
_ANNOUNCEMENTS, _ACKNOWLEDGEMENTS = 1 << 40, 1 << 41  # first tags; those of tensors in CPU memory are smaller


class DeviceReceive(dist.Work):
    """A receive into a tensor on a device."""

    def __init__(
        self, mailbox: DeviceMailbox, tensor: Tensor, announced: Message, announcement: Tensor
    ) -> None:
        super().__init__()
        self._mailbox, self._tensor = mailbox, tensor
        self._announced, self._announcement = announced, announcement
        self._lock = threading.Lock()
        self._is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message, and copy it.

        Raises:
            DistBackendError: The sender is gone, the wait timed out, or the message does not fit into the tensor.
        """
        with self._lock:
            if not self._is_done:
                self._announced.wait(timeout)
                self._mailbox.fetch(self._tensor, self._announced.source_rank(), self._announcement)
                self._is_done = True
        return True

    def is_completed(self) -> bool:
        return self._is_done or (self._announced.is_completed() and self.wait())

    def source_rank(self) -> int:
        return self._announced.source_rank()

    _source_rank = source_rank


class DeviceMailbox:
    """Sends and receives messages of tensors on a device.

    Args:
        mailbox: The mailbox in shared memory, which carries announcements and acknowledgements.
        memory: The device's memory.
        store: The group's store, through which ranks exchange the handles to open each other's memory.
        rank: This rank within the group.
        segment_bytes: Minimum size of a segment of this rank's arena, in bytes.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        memory: DeviceMemory,
        store: dist.Store,
        rank: int,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._mailbox, self._memory, self._store, self._rank = mailbox, memory, store, rank
        self.arena = Arena(memory, segment_bytes)
        self._exported: set[tuple[int, int]] = set()  # segment and rank
        self._opened: dict[tuple[int, int], Tensor] = {}  # by rank and segment
        self._in_flight: list[
            tuple[Message, tuple[int, int, int]]
        ] = []  # acknowledgements, and what they free
        self._serial = 0
        self._lock = threading.Lock()

    def send(self, tensor: Tensor, target: int, tag: int) -> dist.Work:
        """Send a tensor, which may be changed afterwards."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        with self._lock:
            self._reclaim()
            segment, start, size = self.arena.take(flat.numel())
            self.arena.segments[segment][start : start + flat.numel()].copy_(flat)
            self._memory.synchronize()
            self._export(segment, target)
            self._serial += 1
            announcement = torch.tensor([segment, start, flat.numel(), self._serial])
            sent = self._mailbox.send(announcement, target, _ANNOUNCEMENTS + tag)
            acknowledged = self._mailbox.receive(
                torch.empty(0, dtype=torch.uint8), target, _ACKNOWLEDGEMENTS + self._serial
            )
            self._in_flight.append((acknowledged, (segment, start, size)))
        return sent

    def receive(self, tensor: Tensor, source: int, tag: int) -> DeviceReceive:
        """Post the receive of a message from rank `source`, or any rank, that is at most as large as `tensor`."""
        announcement = torch.zeros(4, dtype=torch.int64)
        announced = self._mailbox.receive(announcement, source, _ANNOUNCEMENTS + tag)
        return DeviceReceive(self, tensor, announced, announcement)

    def fetch(self, tensor: Tensor, source: int, announcement: Tensor) -> None:
        """Copy an announced message from the arena of rank `source`, and acknowledge it."""
        segment, start, num_bytes, serial = announcement.tolist()
        room = tensor.numel() * tensor.element_size()
        if num_bytes > room:
            self._acknowledge(source, serial)
            raise dist.DistBackendError(
                f"a message of {num_bytes} bytes from rank {self._mailbox.name(source)} does not fit into a tensor of "
                f"{room} bytes; give both sides tensors of the same size"
            )
        data = self._open(source, segment)[start : start + num_bytes]
        into = tensor.detach().contiguous().view(-1)
        into.view(torch.uint8)[:num_bytes].copy_(data)
        if not tensor.is_contiguous():
            tensor.detach().copy_(into.view(tensor.shape))
        self._memory.synchronize()
        self._acknowledge(source, serial)

    def _acknowledge(self, source: int, serial: int) -> None:
        self._mailbox.send(torch.empty(0, dtype=torch.uint8), source, _ACKNOWLEDGEMENTS + serial)

    def _reclaim(self) -> None:
        waiting = []
        for acknowledged, taken in self._in_flight:
            if acknowledged.is_completed():
                self.arena.give_back(taken)
            else:
                waiting.append((acknowledged, taken))
        self._in_flight = waiting

    def _export(self, segment: int, target: int) -> None:
        if (segment, target) not in self._exported:
            self._store.set(
                f"{self._rank}/{segment}/{target}", self._memory.export(self.arena.segments[segment])
            )
            self._exported.add((segment, target))

    def _open(self, source: int, segment: int) -> Tensor:
        with self._lock:
            if (source, segment) not in self._opened:
                exported = self._store.get(f"{source}/{segment}/{self._rank}").decode()
                try:
                    self._opened[source, segment] = self._memory.open(exported)
                except RuntimeError as error:
                    raise dist.DistBackendError(
                        f"Connection closed by peer: the GPU memory of rank {self._mailbox.name(source)} cannot be "
                        f"opened ({error})"
                    ) from error
            return self._opened[source, segment]

    def drain(self, peers: Peers) -> None:
        """Wait until the other ranks have fetched this rank's messages, except for ranks that are gone.

        A message that no rank has fetched after a few seconds is lost, as when its sender ends in any other way.
        """
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline:
            self._reclaim()
            if not any(not peers.gone([acknowledged.peer]) for acknowledged, _ in self._in_flight):
                break
            time.sleep(_POLL_S)
        self._opened.clear()
