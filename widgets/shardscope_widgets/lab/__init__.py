"""All panels as tabs of one job.

_lab       the container: creates the panel of a tab when it is first opened, and passes the job on
_panels    what each tab shows of the job
"""

from shardscope_widgets.lab._lab import Lab

__all__ = ["Lab"]
