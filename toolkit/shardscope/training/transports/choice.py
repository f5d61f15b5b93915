"""Choice of the transport of a process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from shardscope.errors import LaunchError
from shardscope.machine import can_share_memory
from shardscope.training.transports.cuda_ipc import CudaIpcGroup
from shardscope.training.transports.protocol import Transport
from shardscope.training.transports.shm import CannotShare, SharedMemoryGroup, files
from shardscope.training.transports.tcp import open_tcp

Name = Literal["auto", "shm", "cuda-ipc", "tcp"]
_UNSUITED = {
    ("shm", True): "shared memory is only for ranks on the CPU",
    ("cuda-ipc", False): "the ranks are not on GPUs",
}
"""Reason why a transport is not used, by its name and whether the ranks are on GPUs."""


class Route(NamedTuple):
    """The transport of a process group.

    Attributes:
        group: The process group that carries the communication.
        name: ``"shm"``, ``"cuda-ipc"`` or ``"tcp"``.
        reason: Reason for the choice, in words.
    """

    group: Transport
    name: str
    reason: str


def why_not_shm() -> str:
    """Return why CPU ranks on this machine cannot use shared memory, as far as one process can tell; empty if they can.

    `shardscope doctor` reports this reason.
    """
    if not can_share_memory():
        return "shared memory needs 64-bit Linux, on a processor whose system calls Shardscope knows"
    return files.why_none()


def open_route(
    name: Name,
    store: dist.Store,
    *,
    rank: int,
    world_size: int,
    backend: str,
    timeout: timedelta,
    on_gpu: bool = False,
) -> Route:
    """Connect the ranks of a process group.

    Args:
        name: The transport; ``"auto"`` takes shared memory, of the CPU or the GPUs, if all ranks can use it, and TCP
            otherwise.
        store: The group's store.
        rank: This rank within the group.
        world_size: Number of ranks in the group.
        backend: ``"gloo"`` or ``"nccl"``, which TCP uses for tensors on GPUs.
        timeout: Time after which a rank that waits for another fails.
        on_gpu: Whether the ranks compute on GPUs.

    Raises:
        LaunchError: The transport is ``"shm"`` or ``"cuda-ipc"``, and the ranks cannot use it.
    """
    tcp = open_tcp(backend, store, rank, world_size, timeout)
    if name == "tcp":
        return Route(tcp, "tcp", "the job asks for it")
    if world_size == 1:
        return Route(tcp, "tcp", "a single rank sends nothing")
    reason = _UNSUITED.get((name, on_gpu)) or why_not_shm()
    if not reason:
        try:
            part = dist.PrefixStore("shm", store)
            if not on_gpu:
                return Route(
                    SharedMemoryGroup(tcp, part, timeout), "shm", "all ranks are CPU ranks of one host"
                )
            device = torch.device("cuda", torch.cuda.current_device())
            group = CudaIpcGroup(tcp, part, timeout, device, has_nccl=backend == "nccl")
            return Route(group, "cuda-ipc", "all ranks are GPU ranks of one host")
        except CannotShare as error:
            reason = str(error)
    if name != "auto":
        raise LaunchError(f"transport={name!r} cannot be used: {reason}; use transport='auto' or 'tcp'")
    return Route(tcp, "tcp", reason)
