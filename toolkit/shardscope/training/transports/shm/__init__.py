"""Shared memory between the ranks of one Linux host; see `group` for its parts."""

from shardscope.training.transports.shm import futex
from shardscope.training.transports.shm.group import SharedMemoryGroup
from shardscope.training.transports.shm.memory import CannotShare, why_no_memory
from shardscope.training.transports.shm.shards import ShardBuffers

__all__ = ["CannotShare", "ShardBuffers", "SharedMemoryGroup", "futex", "why_no_memory"]
