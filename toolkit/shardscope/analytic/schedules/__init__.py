"""Pipeline schedules as tables of each rank's operations, used to compute bubble and activation memory.

table = build("1f1b", stages=4, microbatches=8)
table.ranks[0][:5]                      the first five operations of rank 0
table.bubble_fraction                   fraction of the time in which ranks are idle
table.peak_in_flight                    peak number of micro-batches whose activations each stage holds
table.peak_activation()                 peak activations of each rank, where each of a rank's v stages counts 1/v
table.timeline({"F": 1, "I": 1.2, "W": 0.8}, send=0.1).idle     idle time of each rank

This package does not import torch. For schedules that torch implements too, the order of operations is torch's. The
module `closed` computes bubble and memory by formulas over arrays, for searches.
"""

from shardscope.analytic.schedules import closed
from shardscope.analytic.schedules.build import build
from shardscope.analytic.schedules.table import DURATIONS, ScheduledOp, ScheduleTable, Timed, Timeline
from shardscope.analytic.schedules.transfers import Transfers

__all__ = ["DURATIONS", "ScheduledOp", "ScheduleTable", "Timed", "Timeline", "Transfers", "build", "closed"]
