"""The messages between the ranks of a pipeline: when ranks send and receive them, and how long a schedule then takes.

A message is sent once its result exists and the receiving rank has posted the receive: gloo, like MPI's rendezvous
protocol, does not send earlier. PyTorch executes schedules in one of two ways (torch.distributed.pipelining.schedules):

- The classes for one stage per rank block: a rank posts a receive when it needs the result, and waits for its own sends
  before it switches between forward and backward passes (`Schedule1F1B`, `ScheduleGPipe`). Megatron-Core's and
  DeepSpeed's 1F1B do the same.
- The runtime for all other schedules posts a receive after the last pass that the receiver would run before the result
  is sent, if all ranks took turns (`_add_send_recv`), and never waits for its own sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from shardscope.analytic.schedules.table import DEADLOCK, ScheduledOp, ScheduleTable
from shardscope.analytic.schedules.timeline import Timeline
from shardscope.errors import SpecError


class Transfers(NamedTuple):
    """Dependency graph of a schedule table: the dependencies of each operation and each message.

    With n operations, nodes 0 to n-1 are the operations in `ScheduleTable.ops`, and node n+i is the message that
    carries the result of operation i, if another rank needs that result.
    """

    table: ScheduleTable
    ranks: tuple[int, ...]
    """Rank of each operation."""
    targets: tuple[int, ...]
    """Rank to which each operation's result is sent; -1 if the result is not sent."""
    after: tuple[tuple[int, ...], ...]
    """Nodes that each node waits for."""

    @classmethod
    def of(cls, table: ScheduleTable) -> Transfers:
        """Return the transfers of a table; `table.blocks` selects how the schedule is executed."""
        before, needs, count = table.order.before, table.order.needs, len(table.ops)
        ranks = tuple(table.stage_ranks[op.stage] for op in table.ops)
        feeds = {need: i for i, need in enumerate(needs) if need not in {-1, i} and ranks[need] != ranks[i]}
        posted = (
            {i: before[user] for i, user in feeds.items()} if table.blocks else _posted(table, ranks, feeds)
        )
        after: list[tuple[int, ...]] = []
        for i, (last, need) in enumerate(zip(before, needs, strict=True)):
            found = {last, count + need if feeds.get(need) == i else need} - {-1, i}
            if table.blocks and last in feeds and (table.ops[last].op == "F") != (table.ops[i].op == "F"):
                found.add(count + last)
            after.append(tuple(found))
        after += [tuple({i, posted[i]} - {-1}) if i in feeds else () for i in range(count)]
        targets = tuple(ranks[feeds[i]] if i in feeds else -1 for i in range(count))
        return cls(table, ranks, targets, tuple(after))

    def timeline(self, costs: Sequence[float], sends: Sequence[float]) -> Timeline:
        """Return the timeline with messages; a rank sends one message at a time, and receives one at a time.

        Args:
            costs: Duration of each operation in `ScheduleTable.ops`.
            sends: Duration of the message with each operation's result, in the same unit; ignored for unsent results.

        Raises:
            SpecError: The order deadlocks.
        """
        count, num_ranks = len(costs), len(self.table.ranks)
        starts, ends = [0.0] * (2 * count), [0.0] * (2 * count)
        out, into = [0.0] * num_ranks, [0.0] * num_ranks
        for node in self.sequence(ends):
            start = max((ends[each] for each in self.after[node]), default=0.0)
            if node < count:
                starts[node], ends[node] = start, start + costs[node]
                continue
            source, target = self.ranks[node - count], self.targets[node - count]
            ends[node] = max(start, out[source], into[target]) + sends[node - count]
            out[source] = into[target] = ends[node]
        return Timeline(self.table, starts[:count], ends[:count])

    def sequence(self, ends: Sequence[float] | None = None) -> Iterator[int]:
        """Yield all nodes, each after the nodes that it waits for.

        Args:
            ends: End of each node, filled in by the caller for each yielded node; the next node is the one that can
                start first. None for any order.

        Raises:
            SpecError: The order deadlocks.
        """
        left, users = [len(each) for each in self.after], [list[int]() for _ in self.after]
        for node, each in enumerate(self.after):
            for other in each:
                users[other].append(node)
        ready = [(0.0, i) for i in range(len(self.ranks)) if not left[i]]
        while ready:
            _, node = heappop(ready)
            yield node
            for user in users[node]:
                left[user] -= 1
                if not left[user]:
                    heappush(ready, (max(ends[each] for each in self.after[user]) if ends else 0.0, user))
        if any(left):
            raise SpecError(DEADLOCK)


def _posted(table: ScheduleTable, ranks: Sequence[int], feeds: dict[int, int]) -> dict[int, int]:
    """Return the operation after which the runtime posts the receive of each result; -1 for the beginning.

    Ranks take turns. On its turn, a rank appends its next operation to its own list if that operation's inputs exist.
    If the result is sent to another rank, the matching receive is appended to that rank's list at the same time.
    """
    firsts = [0]
    for row in table.ranks:
        firsts.append(firsts[-1] + len(row))
    at, last, needs = firsts[:-1].copy(), [-1] * len(table.ranks), table.order.needs
    done, posted = set[int](), dict[int, int]()
    while len(done) < len(needs):
        before = len(done)
        for rank, end in enumerate(firsts[1:]):
            i = at[rank]
            if i == end or (needs[i] not in (-1, i) and needs[i] not in done):
                continue
            done.add(i)
            last[rank], at[rank] = i, i + 1
            if i in feeds:
                posted[i] = last[ranks[feeds[i]]]
        if len(done) == before:
            raise SpecError(DEADLOCK)
    return posted


AddPass = Callable[[ScheduledOp, list[int], bool], int]
"""Adds the operations of a pass on one stage after some others, and returns the last one; the flag says whether it is
the stage's last backward pass."""
AddMessage = Callable[[ScheduledOp, list[int], int], int]
"""Adds the message of a pass to another rank after some operations, given the pass, these and that rank; returns the
message."""
NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


class Exits(NamedTuple):
    """The last operations of a schedule."""

    ranks: list[int]
    """Last operation of each rank."""
    stages: list[int]
    """Last operation of the last backward pass of each stage."""


def add_schedule(
    table: ScheduleTable, entry: Sequence[int], add_pass: AddPass, add_message: AddMessage
) -> Exits:
    """Add all passes of a schedule, in the order of the table, and the messages between its ranks; see `Transfers`.

    Args:
        table: The schedule.
        entry: For each rank, the operation after which it starts.
        add_pass: Adds the operations of one pass.
        add_message: Adds the message of a pass whose result another rank needs.
    """
    transfers, count = Transfers.of(table), len(table.ops)
    lasts = {op.stage: i for i, op in enumerate(table.ops) if op.op in "BW"}
    ends = [-1] * len(transfers.after)
    exits = Exits(list(entry), [-1] * table.num_stages)
    for node in transfers.sequence():
        after = [ends[each] for each in transfers.after[node]]
        if node >= count:
            ends[node] = add_message(table.ops[node - count], after, transfers.targets[node - count])
            continue
        op, rank = table.ops[node], transfers.ranks[node]
        is_last = lasts[op.stage] == node
        ends[node] = add_pass(op, list(dict.fromkeys([exits.ranks[rank], *after])), is_last)
        exits.ranks[rank] = ends[node]
        if is_last:
            exits.stages[op.stage] = ends[node]
    return exits


def micro_batch_label(op: ScheduledOp, table: ScheduleTable) -> str:
    """Return the text of a pass: its type, its micro-batch and, if a rank holds several stages, its stage."""
    staged = f" on stage {op.stage}" if table.num_stages > len(table.ranks) else ""
    return f"{NAMES[op.op]}, micro-batch {op.microbatch}{staged}"
