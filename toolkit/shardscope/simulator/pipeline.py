"""The passes of a pipeline schedule as operations of a graph, with the messages between its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardscope.analytic.schedules import ScheduledOp, ScheduleTable, Transfers

AddPass = Callable[[ScheduledOp, list[int], bool], int]
"""Adds the operations of a pass on one stage after some others, and returns the last one; the flag says whether it is
the stage's last backward pass."""
AddMessage = Callable[[ScheduledOp, list[int], int], int]
"""Adds the message of a pass to another rank after some operations, given the pass, these and that rank; returns the
message."""
NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


class Exits(NamedTuple):
    """Ends of a schedule."""

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
