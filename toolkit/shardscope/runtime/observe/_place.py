"""Rank and world size of this process in a training script, and the run directory that all ranks share."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardscope.errors import LaunchError
from shardscope.runtime.record.rundir import RunDir
from shardscope.training import clock

_SHARE_S = 300.0
"""Time that a rank waits for rank 0 to share its directory, in seconds."""
_num_shared = 0


@dataclass(frozen=True)
class Place:
    """Rank and world size of this process.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        is_joined: Whether `torch.distributed` is initialised. If not, `rank` and `world_size` come from environment
            variables, and may still change.
    """

    rank: int
    world_size: int
    is_joined: bool

    @classmethod
    def now(cls) -> Self:
        """Return the rank and world size as currently known."""
        if has_group():
            return cls(dist.get_rank(), dist.get_world_size(), is_joined=True)
        environment = os.environ
        rank = int(environment.get("RANK", environment.get("LOCAL_RANK", "0")))
        return cls(rank, int(environment.get("WORLD_SIZE", "1")), is_joined=False)

    @property
    def num_local(self) -> int:
        """Number of ranks on this machine, which share a run directory; other machines may use other directories."""
        return min(self.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))


def has_group() -> bool:
    """Return whether `torch.distributed` is initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def share(directory: RunDir | None, rank: int, problem: Exception | None = None) -> RunDir:
    """Return the run directory of rank 0 on every rank, and align the ranks' clocks.

    Args:
        directory: The directory that rank 0 has created; None on other ranks.
        rank: Rank of this process.
        problem: The error with which rank 0 failed to create a directory; None if it succeeded. Every rank raises it.

    Raises:
        LaunchError: Rank 0 cannot write the run directory.
        RuntimeError: Rank 0 could not create a directory for another reason.
        TimeoutError: Rank 0 has not called this function in time.
    """
    global _num_shared  # noqa: PLW0603 - every rank counts its observed runs, so that each run has its own key
    _num_shared += 1
    store, key = _get_default_store(), f"shardscope/observe/{_num_shared}"
    if rank == 0:
        told = {"path": "" if directory is None else str(directory.path), "problem": str(problem or "")}
        store.set(key, json.dumps({**told, "is_refused": isinstance(problem, LaunchError)}))
    else:
        told = json.loads(_awaited(store, key))
    if problem is not None:
        raise problem
    if told["problem"]:
        raise (LaunchError if told["is_refused"] else RuntimeError)(f"on rank 0: {told['problem']}")
    clock.align(store, rank)
    agreed = Path(told["path"])
    agreed.mkdir(mode=0o700, parents=True, exist_ok=True)  # needed on other machines without a shared folder
    return RunDir(agreed)


def _awaited(store: dist.Store, key: str) -> bytes:
    """Return the value of a key once rank 0 has set it."""
    try:
        store.wait([key], timedelta(seconds=_SHARE_S))
    except RuntimeError as error:  # not all stores raise DistStoreError
        if "timeout" not in str(error).lower():
            raise
        raise TimeoutError(
            f"rank 0 has not begun to observe this training loop within {_SHARE_S:g} s; call ss.observe on every rank"
        ) from None
    value: bytes = store.get(key)
    return value
