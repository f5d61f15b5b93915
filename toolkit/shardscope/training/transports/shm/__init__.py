"""Shared memory between the ranks of one Linux host; see `group` for its parts."""

from shardscope.training.transports.shm.group import SharedMemoryGroup
from shardscope.training.transports.shm.memory import CannotShare

__all__ = ["CannotShare", "SharedMemoryGroup"]
