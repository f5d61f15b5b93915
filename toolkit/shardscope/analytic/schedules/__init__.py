"""Pipeline schedules as tables: the operations of each rank in order, with bubble and memory.

table = build("1f1b", stages=4, microbatches=8)
table.ranks[0][:5]                      the first operations of rank 0
table.bubble_fraction                   the fraction of the time that ranks are idle
table.peak_in_flight                    peak number of micro-batches whose activations each stage holds
table.peak_activation()                 the same by rank, where each of a rank's v stages counts 1/v
table.timeline({"F": 1, "I": 1.2, "W": 0.8}, send=0.1).idle     the time that each rank waits

Nothing here depends on torch. If torch has the schedule, the order of operations is torch's. `closed` gives bubble and
memory as formulas over arrays, for searches.
"""

from shardscope.analytic.schedules import closed
from shardscope.analytic.schedules.build import build
from shardscope.analytic.schedules.table import DURATIONS, ScheduledOp, ScheduleTable, Timed, Timeline

__all__ = ["DURATIONS", "ScheduledOp", "ScheduleTable", "Timed", "Timeline", "build", "closed"]
