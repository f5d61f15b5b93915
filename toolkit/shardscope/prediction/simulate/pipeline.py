"""The passes of a pipeline schedule as operations of a graph, with the messages between its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardscope.analytic.schedules import ScheduledOp, ScheduleTable

AddPass = Callable[[ScheduledOp, list[int], bool], int]
"""Adds the operations of a pass on one stage after some others, and returns the last one; the flag says whether it is
the stage's last backward pass."""
AddMessage = Callable[[ScheduledOp, int, int], int]
"""Adds the message of a pass to another rank, given the pass, its last operation and that rank; returns the message."""
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
    """Add all passes of a schedule, in the order of the table.

    Args:
        table: The schedule.
        entry: For each rank, the operation after which it starts.
        add_pass: Adds the operations of one pass.
        add_message: Adds the message of a pass whose result another rank needs.
    """
    order, ranks = table.order, table.stage_ranks
    lasts = {op.stage: i for i, op in enumerate(table.ops) if op.op in "BW"}
    needed_by = {need: i for i, need in enumerate(order.needs) if need >= 0}
    ends, messages = [-1] * len(table.ops), [-1] * len(table.ops)
    exits = Exits(list(entry), [-1] * table.num_stages)
    for i in order.sequence:
        op, need = table.ops[i], order.needs[i]
        rank = ranks[op.stage]
        after = [exits.ranks[rank]]
        if need >= 0 and need != i:
            after.append(messages[need] if messages[need] >= 0 else ends[need])
        ends[i] = add_pass(op, after, lasts[op.stage] == i)
        exits.ranks[rank] = ends[i]
        if lasts[op.stage] == i:
            exits.stages[op.stage] = ends[i]
        follower = needed_by.get(i)
        if follower is not None and follower != i:
            target = ranks[table.ops[follower].stage]
            if target != rank:
                messages[i] = add_message(op, ends[i], target)
    return exits


def micro_batch_label(op: ScheduledOp, table: ScheduleTable) -> str:
    """Return the text of a pass: its type, its micro-batch and, if a rank holds several stages, its stage."""
    staged = f" on stage {op.stage}" if table.num_stages > len(table.ranks) else ""
    return f"{NAMES[op.op]}, micro-batch {op.microbatch}{staged}"
