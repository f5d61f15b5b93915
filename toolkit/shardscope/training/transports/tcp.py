"""The TCP transport: gloo's connections between all ranks, and NCCL between GPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def open_tcp(
    backend: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Connect the ranks of a group; the result supports CPU and CUDA tensors.

    With the backend ``"nccl"``, CUDA tensors use NCCL and CPU tensors gloo; with ``"gloo"``, both use gloo.
    """
    group = dist.ProcessGroup(store, rank, world_size)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    kinds = dist.ProcessGroup.BackendType
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, world_size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        group._set_default_backend(kinds.NCCL)
    else:
        group._register_backend(torch.device("cuda"), kinds.GLOO, gloo)
        group._set_default_backend(kinds.GLOO)
    return group
