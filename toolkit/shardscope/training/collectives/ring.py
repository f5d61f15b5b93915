"""Ring collectives: reduce-scatter, all-gather, and all-reduce, which is a reduce-scatter and then an all-gather.

The W ranks form a ring, and each communicates only with its two neighbours. A tensor is split into W chunks. In round
k, rank r sends chunk r-1-k (mod W) to the next rank and receives chunk r-2-k (mod W) from the previous one. In the
first W-1 rounds, each rank adds the chunks that it receives to its own; at the end, rank r has the sum of chunk r
(reduce-scatter). In the next W-1 rounds, the summed chunks are passed around the ring (all-gather). In total, each rank
sends 2(W-1)/W times the size of the tensor, which is optimal (Patarasuk and Yuan 2009).

Large chunks are split into S slices of at most `slice_bytes`. Messages are numbered across all rounds: message i is
slice i mod S of round i div S. A slice is sent on as soon as it has been summed, so summing one slice overlaps
receiving the next, and no rank waits for a round to end. Only a few receives are posted in advance, into small buffers
that stay in the cache; with buffers for whole rounds, the same algorithm is up to 1.5 times slower. Over shared memory,
slices are added as they arrive, without a buffer. With two directions, half of the tensor travels around the ring in
the opposite direction, which uses both directions of each link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardscope.runlog.step_events import ring_phase
from shardscope.spec.shares import shard_sizes
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.meter import Traffic

SLICE_BYTES = 4 << 20  # smaller slices overlap better, but each message takes about 50 microseconds
_AHEAD = 2  # receives posted in advance: gloo sends a message only after the receiver has posted its receive
_FIRST_TAG = 1 << 20  # differs from the tags of the user's own sends and receives


def split_sizes(num_elements: int, parts: int) -> list[int]:
    """Return the sizes of `parts` nearly equal pieces; if there is a remainder, the first pieces are larger by one."""
    base, rest = divmod(num_elements, parts)
    return [base + (i < rest) for i in range(parts)]


@dataclass
class _Lane:
    """One direction around the ring: `step` is +1 or -1, and `chunks[c][s]` is a view of slice s of chunk c."""

    step: int
    chunks: list[list[torch.Tensor]]
    scratch: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_slices(self) -> int:
        return len(self.chunks[0])


@dataclass
class RingAllReduce:
    """Ring collectives on a metered process group.

    Attributes:
        group: The metered process group.
        directions: 1, or 2 to send half of the tensor around the ring in the other direction in an all-reduce.
        slice_bytes: Maximum size of a message, in bytes; larger chunks are split into slices.
        members: The ranks of the group that form this ring, in ring order; None for all ranks.
        tag: Tag of the first message of a collective; later messages count up from it.
        shares: Relative sizes of the members' chunks; None for nearly equal chunks.
    """

    group: MeteredProcessGroup
    directions: int = 1
    slice_bytes: int = SLICE_BYTES
    members: Sequence[int] | None = None
    tag: int = _FIRST_TAG
    shares: Sequence[int] | None = None
    _scratch: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = tuple(range(self.group.size()) if self.members is None else self.members)
        self._rank, self._world_size = self.members.index(self.group.rank()), len(self.members)

    @property
    def work_space(self) -> list[torch.Tensor]:
        """Buffers that are reused between calls."""
        return list(self._scratch.values())

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place. It must be contiguous and have the same shape on every rank."""
        flat = tensor.view(-1)
        with self.group.meter.collective("ring_all_reduce", _bytes(flat)) as traffic:
            self._run(list(self._halves(flat)), range(2 * (self._world_size - 1)), traffic)
        return tensor

    def reduce_scatter_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, and return this rank's chunk of the sum, a view of `tensor`.

        The chunk sizes are ``chunk_sizes(tensor.numel())``. The other chunks of `tensor` are overwritten
        with partial sums.
        """
        flat = tensor.view(-1)
        with self.group.meter.collective("ring_reduce_scatter", _bytes(flat)) as traffic:
            self._run([self._lane(flat, 1)], range(self._world_size - 1), traffic)
        own: torch.Tensor = flat.split(self.chunk_sizes(flat.numel()))[self._rank]
        return own

    def all_gather_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill `tensor` with the chunks of all ranks; this rank's chunk must be where `reduce_scatter_` writes it."""
        flat = tensor.view(-1)
        with self.group.meter.collective("ring_all_gather", _bytes(flat)) as traffic:
            first = self._world_size - 1
            self._run([self._lane(flat, 1)], range(first, 2 * first), traffic)
        return tensor

    # Splitting the tensor into chunks and slices.

    def chunk_sizes(self, num_elements: int) -> list[int]:
        """Return the number of elements in each member's chunk of a tensor."""
        if self.shares is None:
            return split_sizes(num_elements, self._world_size)
        return shard_sizes(num_elements, self.shares)

    def _halves(self, flat: torch.Tensor) -> Iterator[_Lane]:
        if self.directions == 1:
            yield self._lane(flat, 1)
        else:
            middle = (flat.numel() + 1) // 2
            lane = self._lane(flat[:middle], 1)
            yield lane
            yield self._lane(flat[middle:], -1, lane.num_slices)

    def _lane(self, flat: torch.Tensor, step: int, num_slices: int | None = None) -> _Lane:
        pieces = flat.split(self.chunk_sizes(flat.numel()))
        num_slices = num_slices or max(1, -(-max(map(_bytes, pieces)) // self.slice_bytes))
        chunks = [list(chunk.split(split_sizes(chunk.numel(), num_slices))) for chunk in pieces]
        return _Lane(step=step, chunks=chunks)

    def _make_scratch(self, lanes: list[_Lane]) -> None:
        """Allocate buffers for the receives posted in advance, or reuse those of an earlier call."""
        example = lanes[0].chunks[0][0]
        sizes = [max(_bytes(chunk[0]) for chunk in lane.chunks) for lane in lanes for _ in range(_AHEAD)]
        kept = self._scratch.get(example.device)
        if kept is None or kept.numel() < sum(sizes):
            kept = torch.empty(sum(sizes), dtype=torch.uint8, device=example.device)
            self._scratch[example.device] = kept
        free = iter(kept[: sum(sizes)].split(sizes))
        for lane in lanes:
            lane.scratch = [next(free).view(example.dtype) for _ in range(_AHEAD)]

    # Messages: number i is slice i mod S of round i div S; the first W-1 rounds reduce.

    def _run(self, lanes: list[_Lane], rounds: range, traffic: Traffic) -> None:
        self._make_scratch(lanes)
        num_slices = lanes[0].num_slices
        messages = range(rounds.start * num_slices, rounds.stop * num_slices)
        transport = self.group.transport(lanes[0].chunks[0][0].device)
        ways = [_LaneTransfer(self, lane, transport, traffic) for lane in lanes]
        for way in ways:
            for i in messages[:_AHEAD]:
                way.post_receive(i)
            for i in messages[:num_slices]:
                way.send(i)
        for i in messages:
            for way in ways:
                way.take(i)
                if i + _AHEAD < messages.stop:
                    way.post_receive(i + _AHEAD)
                if i + num_slices < messages.stop:
                    way.send(i + num_slices)
        for way in ways:
            way.finish()


class _LaneTransfer:
    """Sends and receives the messages of one lane; any overhead here occurs 2(W-1)S times per all-reduce."""

    def __init__(self, ring: RingAllReduce, lane: _Lane, transport: Any, traffic: Traffic) -> None:
        assert ring.members is not None
        rank, self.world_size = ring._rank, ring._world_size  # noqa: SLF001 - a part of the ring
        self.lane, self.traffic = lane, traffic
        self.next = ring.members[(rank + lane.step) % self.world_size]
        self.previous = ring.members[(rank - lane.step) % self.world_size]
        self._send, self._recv = transport.send, transport.recv
        is_cpu = lane.chunks[0][0].is_cpu  # shared memory adds messages to CPU tensors as they arrive
        self._recv_add = getattr(transport, "recv_add", None) if is_cpu else None
        self.num_slices = lane.num_slices
        self.num_reducing = (self.world_size - 1) * lane.num_slices
        self.first_chunk = rank - lane.step
        self.first_tag = ring.tag + (lane.step < 0)  # every message in flight has its own tag
        self.sends: dict[int, dist.Work] = {}
        self.receives: dict[int, dist.Work] = {}

    def _outgoing(self, i: int) -> torch.Tensor:
        k, s = divmod(i, self.num_slices)
        return self.lane.chunks[(self.first_chunk - self.lane.step * k) % self.world_size][s]

    def post_receive(self, i: int) -> None:
        """Post the receive of message `i`, whose slice this rank sends on in the next round."""
        into = self._outgoing(i + self.num_slices)
        if not into.numel():
            return
        receive = self._recv
        if i < self.num_reducing and self._recv_add is not None:
            receive = self._recv_add
        elif i < self.num_reducing:
            into = self.lane.scratch[i % _AHEAD][: into.numel()]
        else:  # the same slice was sent W-1 rounds earlier, and may be overwritten once that send has finished
            work = self.sends.pop(i - self.num_reducing, None)
            if work is not None:
                work.wait()
        self.receives[i] = receive([into], self.previous, self.first_tag + 2 * i)
        self.traffic.received_bytes += _bytes(into)

    def take(self, i: int) -> None:
        """Wait for message `i`; in a round of the reduce-scatter, add its slice to this rank's slice."""
        work = self.receives.pop(i, None)
        if work is None:
            return
        work.wait()
        self.traffic.arrived(self.previous, _bytes(self._outgoing(i + self.num_slices)))
        if i < self.num_reducing and self._recv_add is None:
            own = self._outgoing(i + self.num_slices)
            own.add_(self.lane.scratch[i % _AHEAD][: own.numel()])

    def send(self, i: int) -> None:
        """Send message `i`. Both sides skip empty slices, which occur if there are fewer elements than slices."""
        tensor = self._outgoing(i)
        if not tensor.numel():
            return
        self.traffic.count_sent(self.next, _bytes(tensor), lambda: self._label(i))
        self.sends[i] = self._send([tensor], self.next, self.first_tag + 2 * i)

    def _label(self, i: int) -> tuple[str, str]:
        k = i // self.num_slices
        chunk = (self.first_chunk - self.lane.step * k) % self.world_size
        return f"chunk {chunk}", ring_phase(k, self.world_size - 1)

    def finish(self) -> None:
        """Wait until all sends have finished."""
        for work in self.sends.values():
            work.wait()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes
