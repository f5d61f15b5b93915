"""The messages of one step, one by one: sender, receiver, bytes, round and collective of each.

A strategy's `plan` describes a step as exchanges. Each exchange is one call of a collective, with a list of moves for
each round. The moves of a step add up to the strategy's `traffic`, rank by rank and collective by collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from shardscope.analytic.communication.ring import Ints, Shares, chunk_sizes
from shardscope.analytic.communication.traffic import Traffic
from shardscope.analytic.memory.in_flight import StageSaved
from shardscope.analytic.schedules.table import ScheduleTable
from shardscope.runlog.step_events import ring_phase

Phase = Literal["forward", "backward", "weights", "optimizer"]
"""``weights`` is the pass for weights of a pipeline's split backward pass."""


class Move(NamedTuple):
    """One message of a collective: a whole chunk, even if it is sent in several slices."""

    source: int
    target: int
    num_bytes: int
    item: str = ""
    """The part of the tensor, such as ``chunk 1``; empty for the whole tensor."""


class Round(NamedTuple):
    """Moves that happen at the same time."""

    name: str
    moves: tuple[Move, ...]
    lag: int = 0
    """Number of slices by which a move trails the move in the opposite direction between the same ranks in an earlier
    round: slice i is sent after slice i + `lag` of that move has arrived."""


class Moves(NamedTuple):
    """Moves that happen at the same time, as arrays: collectives of many ranks have too many moves for objects."""

    name: str
    source: Ints
    target: Ints
    num_bytes: Ints
    chunk: Ints | None = None
    """Number of the tensor's chunk in each move; None if the tensor is not divided into chunks."""

    @classmethod
    def of(cls, each: Round) -> Moves:
        """Return the moves of a round."""
        source, target, size = np.array([move[:3] for move in each.moves], np.int64).reshape(-1, 3).T
        return cls(each.name, source, target, size)

    def listed(self) -> Iterator[Move]:
        """Yield the moves one by one."""
        ends = zip(self.source.tolist(), self.target.tolist(), self.num_bytes.tolist(), strict=True)
        if self.chunk is None:
            return (Move(*each) for each in ends)
        return (Move(*each, f"chunk {chunk}") for each, chunk in zip(ends, self.chunk.tolist(), strict=True))

    def shift(self, world_size: int) -> int | None:
        """Return s if each rank r sends the same number of bytes to rank r+s (mod W), and nothing else; otherwise
        None.
        """
        shifts = (self.target - self.source) % world_size
        if len(self.source) != world_size or (shifts != shifts[0]).any():
            return None
        is_even = (np.bincount(self.source) == 1).all() and (self.num_bytes == self.num_bytes[0]).all()
        return int(shifts[0]) if is_even else None


class When(NamedTuple):
    """Time at which an exchange starts: when the fraction `part` of a pass or of the optimizer's update is done."""

    phase: Phase
    part: float = 1.0
    micro_batch: int = 0
    stage: int | None = None
    """Stage of a pipeline in whose pass the exchange starts; None if each rank has one pass of a micro-batch, and for
    exchanges after the passes of a pipeline."""


@dataclass(frozen=True)
class Exchange:
    """One call of a collective.

    Attributes:
        collective: Name of the collective in the strategy's traffic.
        when: Time at which the exchange starts.
        rounds: Rounds of the exchange; empty if the messages are unknown, because the backend sends them.
        whole: Bytes that each rank sends, by rank, if the messages are unknown.
        towards: The rank to which each rank's unknown messages are assumed to go; None for the next rank.
        gathers: Whether the exchange gathers parameters, which ranks hold until they are used.
        blocks: Whether the pass waits for the exchange, even where other exchanges overlap with it.
        is_attached: Whether the messages, such as headers, are part of the next exchange's and add no latency.
        slices: Number of slices of each message; None for the mean of all calls of the collective (`message_slices`).
    """

    collective: str
    when: When
    rounds: tuple[Round, ...] = ()
    whole: Ints | None = None
    towards: Ints | None = None
    gathers: bool = False
    blocks: bool = False
    is_attached: bool = False
    slices: int | None = None

    def groups(self, world_size: int) -> list[list[int]]:
        """Return the ranks of each group that communicates by itself, if the messages are unknown.

        Each group is a cycle of `towards`, and starts with its first rank; a rank by itself does not communicate.
        """
        if self.towards is None:
            return [[*range(world_size)]]
        found, left = list[list[int]](), dict.fromkeys(range(world_size))
        while left:
            rank, group = next(iter(left)), list[int]()
            while rank in left:
                del left[rank]
                group.append(rank)
                rank = int(self.towards[rank])
            found.append(group)
        return [group for group in found if len(group) > 1]

    @property
    def num_moves(self) -> int:
        """Number of messages."""
        return sum(len(each.moves) for each in self.rounds)

    @property
    def num_bytes(self) -> int:
        """Bytes that all ranks send together."""
        if self.whole is not None:
            return int(self.whole.sum())
        return sum(move.num_bytes for each in self.rounds for move in each.moves)


class Flow(NamedTuple):
    """The passes of a pipeline."""

    table: ScheduleTable
    """Schedule of one pass of `table`'s micro-batches through all stages."""
    passes: int
    """Number of passes of `table` in a step, one after the other."""
    boundary_bytes: tuple[int, ...]
    """Bytes of one micro-batch's output, for each stage except the last."""
    saved: tuple[StageSaved, ...]
    """What each stage saves for the backward pass of one micro-batch."""
    stage_costs: tuple[float, ...] = ()
    """Compute time of each stage, in any unit; empty if all are equal."""
    ranks_meet: bool = False
    """Whether ranks communicate after the last pass, so that no rank starts the next step early."""
    copies: int = 1
    """Number of copies of the pipeline; the ranks that hold the same stages are neighbours."""
    sends: str = "send"
    """Name, in a strategy's traffic, of the messages between stages."""

    def ranks(self, rank: int) -> range:
        """Return the ranks of the job that are copies of a rank of the table."""
        return range(rank * self.copies, (rank + 1) * self.copies)

    def crossing(self, op: str, stage: int) -> tuple[int, int] | None:
        """Return the receiving rank and the bytes of an operation's message; None if it sends no message."""
        ranks, other = self.table.stage_ranks, stage + 1 if op == "F" else stage - 1
        if op == "W" or not 0 <= other < len(ranks) or ranks[other] == ranks[stage]:
            return None
        return ranks[other], self.boundary_bytes[min(stage, other)]

    def sent_bytes(self, world_size: int) -> list[int]:
        """Return the bytes of activations and their gradients that each rank sends in a step, by rank."""
        sent = [0] * world_size
        for op in self.table.ops:
            message = self.crossing(op.op, op.stage)
            if message is not None:
                for rank in self.ranks(self.table.stage_ranks[op.stage]):
                    sent[rank] += message[1] * self.passes
        return sent


class StepPlan(NamedTuple):
    """All messages of one step."""

    exchanges: tuple[Exchange, ...] = ()
    flow: Flow | None = None
    """The passes of a pipeline, which also send messages; None if all ranks compute at the same time."""
    updating: tuple[int, ...] | None = None
    """Ranks that run the optimizer; None for all."""


def message_slices(plan: StepPlan, traffic: Traffic) -> dict[str, int]:
    """Return the number of slices per message, by collective, computed from the number of messages that ranks send."""
    moves: dict[str, dict[int, int]] = {}
    for each in plan.exchanges:
        count = moves.setdefault(each.collective, {})
        for move in (move for rounds in each.rounds for move in rounds.moves):
            count[move.source] = count.get(move.source, 0) + 1
    return {
        name: max(1, round(float(np.max(traffic[name].messages)) / max(count.values())))
        for name, count in moves.items()
        if name in traffic and count
    }


def whole(
    traffic: Traffic, when: When, *, gathers: bool = False, towards: Ints | None = None
) -> list[Exchange]:
    """Return one exchange without rounds for each collective of `traffic`."""
    return [
        Exchange(name, when, whole=sent.bytes, towards=towards, gathers=gathers)
        for name, sent in traffic.items()
    ]


def ring_moves(
    op: str, num_elements: int, element_bytes: int, world_size: int, *, step: int = 1, shares: Shares = None
) -> Iterator[Moves]:
    """Yield the rounds of a collective on Shardscope's ring, as arrays.

    In round k, rank r sends chunk r-1-k (mod W) to the next rank, as in `shardscope.training.collectives.ring`. The
    first W-1 rounds reduce, the next W-1 rounds gather. With `step` -1, the ring runs in the other direction.
    """
    sizes = chunk_sizes(num_elements, world_size, shares) * element_bytes
    ranks, last = np.arange(world_size), world_size - 1
    targets, is_even = (ranks + step) % world_size, sizes.min() == sizes.max() > 0
    for k in {"reduce_scatter": range(last), "all_gather": range(last, 2 * last)}.get(op, range(2 * last)):
        name, chunk = ring_phase(k, last), (ranks - step - step * k) % world_size
        if is_even:  # all rounds share arrays
            yield Moves(name, ranks, targets, sizes, chunk)
        else:
            sent = sizes[chunk] > 0
            yield Moves(name, ranks[sent], targets[sent], sizes[chunk][sent], chunk[sent])


def ring_rounds(
    op: str,
    num_elements: int,
    element_bytes: int,
    world_size: int,
    *,
    directions: int = 1,
    shares: Shares = None,
) -> tuple[Round, ...]:
    """Return the rounds of a collective on Shardscope's ring; the arguments are the same as for `traffic.by_ring`."""
    first = (num_elements + 1) // 2 if directions == 2 else num_elements
    lanes = [(1, first), (-1, num_elements - first)][:directions]
    rings = [
        ring_moves(op, size, element_bytes, world_size, step=step, shares=shares) for step, size in lanes
    ]
    return tuple(
        Round(both[0].name, tuple(move for each in both for move in each.listed()))
        for both in zip(*rings, strict=True)
    )


def pairwise_moves(num_bytes: int, world_size: int) -> Iterator[Moves]:
    """Yield the rounds of an all-to-all in pairs: in round k, rank r sends its block to rank r+k (mod W)."""
    ranks, block = np.arange(world_size), num_bytes // world_size
    for k in range(1, world_size):
        yield Moves(f"shift {k}", ranks, (ranks + k) % world_size, np.full(world_size, block))


def tree_rounds(num_bytes: int, world_size: int) -> tuple[Round, ...]:
    """Return the rounds of an all-reduce over Shardscope's binary tree: one for each level, up and then down.

    Rank r has the parent (r-1) // 2, as in `tree_all_reduce_bytes`. A rank at depth d > 0 sends slices down with a lag
    of 2d + 2, as in `shardscope.training.collectives.tree`.
    """
    levels: dict[int, list[int]] = {}
    for rank in range(1, world_size):
        levels.setdefault((rank + 1).bit_length() - 1, []).append(rank)
    up = [
        Round(f"up, level {depth}", tuple(Move(r, (r - 1) // 2, num_bytes, "partial sum") for r in levels[depth]))
        for depth in sorted(levels, reverse=True)
    ]  # fmt: skip
    down = [
        Round(
            f"down, level {depth}",
            tuple(Move((r - 1) // 2, r, num_bytes, "total") for r in levels[depth]),
            lag=2 * depth if depth > 1 else 0,
        )
        for depth in sorted(levels)
    ]
    return tuple(up + down)


def neighbour_rounds(sent_bytes: int, world_size: int) -> tuple[Round, ...]:
    """Return the single round in which each rank sends `sent_bytes`, divided equally between its ring neighbours."""
    ranks = range(world_size)
    peers = [list(dict.fromkeys([(rank + 1) % world_size, (rank - 1) % world_size])) for rank in ranks]
    moves = tuple(
        Move(rank, peer, sent_bytes // len(peers[rank])) for rank in ranks for peer in peers[rank] if peer != rank
    )  # fmt: skip
    return (Round("", moves),) if sent_bytes else ()


def pair_rounds(packet_bytes: int, world_size: int) -> tuple[Round, ...]:
    """Return the single round in which each rank sends one packet to every other rank; empty packets are not sent.

    Each rank sends to the next rank first, so that no two ranks send to the same rank at the same time.
    """
    ranks = range(world_size)
    pairs = ((a, (a + ahead) % world_size) for ahead in ranks[1:] for a in ranks)
    moves = tuple(Move(a, b, packet_bytes, "packet") for a, b in pairs if packet_bytes)
    return (Round("", moves),) if moves else ()


def shifted(exchange: Exchange, first: int, world_size: int) -> Exchange:
    """Return an exchange of ranks 0 to N-1 as that of the ranks `first` to ``first + N - 1`` of `world_size` ranks."""
    whole = towards = None
    if exchange.whole is not None:
        count, towards = len(exchange.whole), np.arange(world_size)
        whole = np.zeros(world_size, dtype=np.int64)
        whole[first : first + count] = exchange.whole
        to_next = (np.arange(count) + 1) % count if exchange.towards is None else exchange.towards
        towards[first : first + count] = first + to_next
    members = {rank for each in exchange.rounds for move in each.moves for rank in move[:2]}
    group = tuple(range(first, first + max(members, default=0) + 1))
    return replace(exchange, rounds=in_groups(exchange.rounds, [group]), whole=whole, towards=towards)


def in_groups(rounds: Iterable[Round], groups: Iterable[tuple[int, ...]]) -> tuple[Round, ...]:
    """Return the rounds of several groups that communicate concurrently, given the rounds of a group of ranks
    0 to N-1.
    """
    members = list(groups)
    return tuple(
        Round(
            each.name,
            tuple(m._replace(source=g[m.source], target=g[m.target]) for g in members for m in each.moves),
        )
        for each in rounds
    )
