"""Choice of the transport of a process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from shardscope.errors import LaunchError
from shardscope.training.transports.shm import CannotShare, SharedMemoryGroup, futex
from shardscope.training.transports.tcp import open_tcp

Name = Literal["auto", "shm", "tcp"]


class Route(NamedTuple):
    """The transport of a process group.

    Attributes:
        group: The process group that carries the communication.
        name: ``"shm"`` or ``"tcp"``.
        reason: Why it is used, in words.
    """

    group: Any
    name: str
    reason: str


def why_not_shm(*, on_gpu: bool, world_size: int) -> str:
    """Return why ranks cannot use shared memory, as far as one rank can tell; empty if they may."""
    if on_gpu:
        return "shared memory is only for ranks on the CPU"
    if world_size == 1:
        return "a single rank sends nothing"
    if not futex.is_supported():
        return "shared memory needs 64-bit Linux on a processor whose system calls are known"
    return ""


def open_route(
    name: Name,
    backend: str,
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *,
    on_gpu: bool = False,
) -> Route:
    """Connect the ranks of a process group.

    Args:
        name: The transport; ``"auto"`` takes shared memory if all ranks can use it, and TCP otherwise.
        backend: ``"gloo"`` or ``"nccl"``.
        store: The group's store.
        rank: This rank within the group.
        world_size: Number of ranks in the group.
        timeout: Time after which a rank that waits for another fails.
        on_gpu: Whether the ranks compute on GPUs.

    Raises:
        LaunchError: The transport is ``"shm"``, and the ranks cannot use it.
    """
    tcp = open_tcp(backend, store, rank, world_size, timeout)
    if name == "tcp":
        return Route(tcp, "tcp", "the job asks for it")
    reason = why_not_shm(on_gpu=on_gpu, world_size=world_size)
    if not reason:
        try:
            group = SharedMemoryGroup(tcp, dist.PrefixStore("shm", store), timeout)
        except CannotShare as error:
            reason = str(error)
        else:
            return Route(group, "shm", "all ranks are CPU ranks of one host")
    if name == "shm" and world_size > 1:
        raise LaunchError(f"transport='shm' cannot be used: {reason}; use transport='auto' or 'tcp'")
    return Route(tcp, "tcp", reason)
