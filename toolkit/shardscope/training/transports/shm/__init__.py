"""Shared memory between the ranks of one Linux host; see `group` for its parts."""

from shardscope.training.transports.shm import files, futex
from shardscope.training.transports.shm.group import SharedMemoryGroup
from shardscope.training.transports.shm.memory import CannotShare
from shardscope.training.transports.shm.shards import ShardBuffers

__all__ = ["CannotShare", "ShardBuffers", "SharedMemoryGroup", "files", "futex"]
