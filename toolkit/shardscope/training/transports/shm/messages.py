"""Messages between the ranks of a group, matched by their sender and tag.

There is a pipe from each rank to each other rank. A send writes its message to the pipe, and has finished when the
whole message has been written; a receive has finished when its message has been copied from the pipe. A message for
which no receive has been posted stays in the pipe. If a receive from the same rank waits for a later message, the
message before it is copied to memory of this rank's own, and kept there until its receive is posted. So, as with gloo,
a large message flows once its receive has been posted; a small one leaves its sender at once.

Nothing moves by itself: a thread that waits for one message moves all messages of its rank, so ranks that send to each
other do not deadlock. When no thread waits, but a message is stuck, because it does not fit into its pipe, a thread of
the mailbox takes over: its progress thread. Messages that fit never wake it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict, deque
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.transports.shm.memory import address_of
from shardscope.training.transports.shm.peers import PATIENCE_S, Patience, Peers
from shardscope.training.transports.shm.pipe import Incoming, Outgoing, Target

ANY = -1
"""Source of a receive that accepts a message from any rank."""
_GRACE_S = 0.001  # the progress thread leaves the first move to a thread that is about to wait


class Message(dist.Work):
    """A send or a receive.

    Args:
        mailbox: The mailbox that carries out the send or receive.
        tensor: The tensor to send, or to receive into; it must be in CPU memory.
        peer: The other rank; `ANY` for a receive from any rank.
        tag: Message tag.
    """

    def __init__(self, mailbox: Mailbox, tensor: Tensor, peer: int, tag: int) -> None:
        super().__init__()
        self.peer, self.tag = peer, tag
        self.is_done = False
        self.failure = ""
        """Reason why the message can never be completed, in words; empty if there is none."""
        self._mailbox, self._tensor = mailbox, tensor.detach() if tensor.requires_grad else tensor
        self._flat = self._tensor.contiguous()  # a copy if the elements are not in one row
        self.address: int = address_of(self._flat)
        self.size: int = self._flat.nbytes

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has been sent or received.

        Raises:
            DistBackendError: The peer is gone, or the wait timed out. As with gloo, this rank then leaves the group.
        """
        if not self.is_done:
            self._mailbox.complete(self, timeout)
        if self.failure:
            raise dist.DistBackendError(self.failure)
        return True

    def is_completed(self) -> bool:
        return self.is_done or self._mailbox.has_finished(self)

    def is_success(self) -> bool:
        return self.is_done and not self.failure

    def get_future(self) -> NoReturn:
        """Raise an error: as with gloo, messages have no future; gloo's own error takes longer than the message."""
        raise RuntimeError("a message has no future; call its wait() instead")

    def source_rank(self) -> int:
        return self.peer

    _source_rank = source_rank

    def finished(self) -> None:
        """Called when the whole message has been copied."""
        self.is_done = True
        self._mailbox.num_unfinished -= 1


class Send(Message):
    """A message that is being sent."""

    def __str__(self) -> str:
        return f"rank {self._mailbox.name(self.peer)} to receive a message"


class Receive(Message):
    """A message that is being received."""

    def __str__(self) -> str:
        return "a message from " + (
            "any rank" if self.peer == ANY else f"rank {self._mailbox.name(self.peer)}"
        )

    def take(self, address: int, offset: int, size: int) -> None:
        """Copy a piece of the message to the tensor."""
        ctypes.memmove(self.address + offset, address, size)

    def fits(self, size: int) -> bool:
        """Return whether a message of `size` bytes can be received."""
        return size <= self.size

    def refuse(self, source: int, size: int) -> None:
        """Raise the error for a received message of the wrong size."""
        self.failure = (
            f"a message of {size} bytes from rank {self._mailbox.name(source)} does not fit into a tensor of "
            f"{self.size} bytes; give both sides tensors of the same size"
        )
        super().finished()

    def finished(self) -> None:
        if self._flat is not self._tensor:
            self._tensor.copy_(self._flat)
        super().finished()


class Addition(Receive):
    """A message that is added to a contiguous tensor of its size as it arrives, without an intermediate copy."""

    def fits(self, size: int) -> bool:
        return size == self.size

    def take(self, address: int, offset: int, size: int) -> None:
        """Add a piece of the message to the tensor."""
        if not size:
            return
        flat = self._flat.view(-1)
        piece = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=flat.dtype)
        first = offset // flat.element_size()
        flat[first : first + piece.numel()].add_(piece)


class _Kept:
    """A message that has arrived before its receive was posted, or is still arriving."""

    def __init__(self, source: int, size: int) -> None:
        self.source, self._size = source, size
        self._data = torch.empty(size, dtype=torch.uint8)
        self._address: int = self._data.data_ptr()
        self._is_complete = False
        self._receive: Receive | None = None

    def take(self, address: int, offset: int, size: int) -> None:
        """Keep a piece of the message."""
        ctypes.memmove(self._address + offset, address, size)

    def deliver_to(self, receive: Receive) -> None:
        """Copy the message to the tensor of a receive, at once or when the whole message has arrived."""
        receive.peer, self._receive = self.source, receive
        if not self._is_complete:
            return
        if not receive.fits(self._size):
            receive.refuse(self.source, self._size)
            return
        if self._size:
            receive.take(self._address, 0, self._size)
        receive.finished()

    def finished(self) -> None:
        self._is_complete = True
        if self._receive is not None:
            self.deliver_to(self._receive)


class Mailbox:
    """Sends and receives the messages of one rank in a group; any thread may call it.

    Args:
        peers: The ranks of the group.
        timeout_s: Time after which a wait fails, in seconds, unless the wait has a timeout of its own.
    """

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.num_unfinished = 0
        """Number of sends and receives that have not finished."""
        self._peers = peers
        self._others = [rank for rank in range(peers.world_size) if rank != peers.rank]
        self._outgoing = {rank: Outgoing(peers, rank) for rank in self._others}
        self._incoming = [Incoming(peers, rank, self._accept) for rank in self._others]
        self._posted: dict[
            tuple[int, int], deque[Receive]
        ] = {}  # by sender and tag; most tags occur only once
        self._num_posted: defaultdict[int, int] = defaultdict(int)  # by sender
        self._kept: dict[int, list[_Kept]] = {}  # by tag
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._progress = _ProgressThread(self, peers)

    def name(self, rank: int) -> int:
        """Return the rank in the whole job, for error messages."""
        return self._peers.global_ranks[rank]

    def send(self, tensor: Tensor, target: int, tag: int) -> Send:
        """Send a tensor; do not change it before the returned work has finished."""
        if target == self._peers.rank:
            raise ValueError(f"rank {self.name(target)} cannot send a message to itself")
        message = Send(self, tensor, target, tag)
        with self._lock:
            self._count()
            self._outgoing[target].queue.append(message)
            self._outgoing[target].push()
            self._call_if_stuck()
        return message

    def receive(self, tensor: Tensor, source: int, tag: int, kind: type[Receive] = Receive) -> Receive:
        """Post the receive of a message from rank `source`, or `ANY`, that is at most as large as `tensor`.

        Args:
            tensor: Tensor to receive into.
            source: The sender.
            tag: Message tag.
            kind: `Receive`, or `Addition` to add the message to the tensor.
        """
        message = kind(self, tensor, source, tag)
        with self._lock:
            self._count()
            kept = self._take_kept(source, tag)
            if kept is not None:
                kept.deliver_to(message)
            else:
                self._posted.setdefault((source, tag), deque()).append(message)
                self._num_posted[source] += 1
            self._call_if_stuck()  # a kept message may still be arriving
        return message

    def _count(self) -> None:
        self.num_unfinished += 1
        self._progress.start()

    def _is_stuck(self) -> bool:
        """Return whether a message is stuck, and no thread waits that would move it; the caller holds the lock."""
        if self._num_waiting or not self.num_unfinished or self._peers.is_closed:
            return False
        is_full = any(outgoing.queue for outgoing in self._outgoing.values())
        return is_full or any(incoming.is_stuck for incoming in self._incoming)

    def _call_if_stuck(self) -> None:
        if self._is_stuck():
            self._peers.alarm(self._peers.rank)

    def _take_kept(self, source: int, tag: int) -> _Kept | None:
        kept = self._kept.get(tag, [])
        message = next((message for message in kept if source in (message.source, ANY)), None)
        if message is not None:
            kept.remove(message)
            if not kept:
                del self._kept[tag]
        return message

    def _accept(self, source: int, tag: int, size: int) -> Target | None:
        receive = self._take_posted(source, tag)
        if receive is not None:
            if receive.fits(size):
                receive.peer = source
                return receive
            receive.refuse(source, size)
            return _Kept(source, size)
        if not self._num_posted[source] and not self._num_posted[ANY]:
            return None
        kept = _Kept(source, size)
        self._kept.setdefault(tag, []).append(kept)
        return kept

    def _take_posted(self, source: int, tag: int) -> Receive | None:
        key = next((key for key in ((source, tag), (ANY, tag)) if key in self._posted), None)
        if key is None:
            return None
        receive = self._posted[key].popleft()
        self._num_posted[key[0]] -= 1
        if not self._posted[key]:
            del self._posted[key]
        return receive

    def _move(self, num_watching: int) -> bool:
        """Move all messages as far as possible; return whether anything moved.

        Args:
            num_watching: Number of other threads that may wait for one of the messages.
        """
        moved = False
        for incoming in self._incoming:
            moved |= incoming.pull()
        for outgoing in self._outgoing.values():
            if outgoing.queue:
                moved |= outgoing.push()
        if moved and num_watching:
            self._peers.ring(self._peers.rank)
        return moved

    def complete(self, message: Message, timeout: timedelta | None) -> None:
        """Wait until a message has finished; see `Message.wait`."""
        patience = Patience(self._peers, timeout.total_seconds() if timeout else self.timeout_s)
        with self._lock:
            self._num_waiting += 1
        try:
            while not message.is_done:
                bell = self._peers.bell()
                if not self._try(message) and not message.is_done:
                    self._give_up_if(patience, message)
                    self._peers.sleep(bell, patience.next_s())
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._call_if_stuck()

    def has_finished(self, message: Message) -> bool:
        """Return whether a message has finished, after all messages have been moved as far as possible."""
        with self._lock:
            if not message.is_done:
                self._move(self._num_waiting)
        return message.is_done

    def _try(self, message: Message) -> bool:
        with self._lock:
            return message.is_done or self._move(self._num_waiting - 1)

    def _give_up_if(self, patience: Patience, message: Message) -> None:
        any_rank = message.peer == ANY
        problem = patience.problem(self._others if any_rank else [message.peer], may_leave=any_rank)
        if problem and not self._try(message):
            self._peers.close(problem)
            raise dist.DistBackendError(f"{problem}, while this rank was waiting for {message}")

    def move_unattended(self) -> bool:
        """Move messages once if one is stuck and no thread waits; return False if not."""
        bell = self._peers.bell()
        with self._lock:
            if not self._is_stuck():
                return False
            moved = self._move(0)
        if not moved:
            self._peers.sleep(bell, PATIENCE_S)
        return True

    def close(self) -> None:
        """Stop the progress thread; the peers must have been closed before."""
        self._progress.close()


class _ProgressThread:
    """The thread that moves the messages of a mailbox while one is stuck and no thread waits."""

    def __init__(self, mailbox: Mailbox, peers: Peers) -> None:
        self._mailbox, self._peers = mailbox, peers
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the thread, unless it has been started; the caller holds the mailbox's lock."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            alarm = self._peers.last_alarm()
            time.sleep(_GRACE_S)
            while self._mailbox.move_unattended():
                pass
            if not self._is_closed:
                self._peers.sleep_until_alarm(alarm)

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed = True
        self._peers.alarm(self._peers.rank)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
