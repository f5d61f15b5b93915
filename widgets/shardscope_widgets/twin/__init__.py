"""The Twin: one job as predicted by formulas, as simulated, and as run on real ranks.

`Twin` shows a run that has trained: every term in a table, what explains the difference in step time, and one step of
each rank with the simulated step below it.
"""

from shardscope_widgets.twin._twin import Twin

__all__ = ["Twin"]
