"""Pipeline schedules as tables: which rank does what, in which order, and what that costs.

table = build("1f1b", stages=4, microbatches=8)
table.ranks[0][:5]        the first operations of rank 0
table.bubble_fraction     the share of the time that ranks wait
table.peak_in_flight      micro-batches whose activations each stage holds at most

Nothing here depends on torch; the orders are those in which torch's schedules run.
"""

from shardscope.analytic.schedules.build import SCHEDULES, build
from shardscope.analytic.schedules.table import Op, Table, Timed

__all__ = ["SCHEDULES", "Op", "Table", "Timed", "build"]
