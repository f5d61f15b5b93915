"""The position of this process among the ranks of a training script, and the run directory that they share."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardscope.errors import LaunchError
from shardscope.runtime.rundir import RunDir
from shardscope.training import clock

_num_shared = 0


@dataclass(frozen=True)
class Place:
    """Rank of this process, as far as it is known.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        is_joined: Whether `torch.distributed` is initialised; until then, the other fields come from the environment.
    """

    rank: int
    world_size: int
    is_joined: bool

    @classmethod
    def now(cls) -> Self:
        """Return the current place of this process."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), is_joined=True)
        environment = os.environ
        rank = int(environment.get("RANK", environment.get("LOCAL_RANK", "0")))
        return cls(rank, int(environment.get("WORLD_SIZE", "1")), is_joined=False)

    @property
    def is_settled(self) -> bool:
        """Whether this place is final: the process has joined the others, or is alone."""
        return self.is_joined or (self.world_size == 1 and self.rank == 0)

    @property
    def num_local(self) -> int:
        """Number of ranks that certainly write to the same run directory: those on this machine."""
        return min(self.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))


def share(directory: RunDir | None, rank: int, problem: str = "") -> RunDir:
    """Return the run directory of rank 0 on every rank, and align the ranks' clocks.

    Args:
        directory: The directory that rank 0 has created; None on other ranks.
        rank: This rank.
        problem: Why rank 0 could not create one; empty if it could.

    Raises:
        LaunchError: Rank 0 could not create a directory.
    """
    global _num_shared  # noqa: PLW0603 - every rank counts its observed runs, so that each run has its own key
    _num_shared += 1
    store, key = _get_default_store(), f"shardscope/observe/{_num_shared}"
    if rank == 0:
        path = "" if directory is None else str(directory.path)
        store.set(key, json.dumps({"path": path, "problem": problem}))
    told = json.loads(store.get(key))
    if told["problem"]:
        raise LaunchError(told["problem"])
    clock.align(store, rank)
    agreed = Path(told["path"])
    agreed.mkdir(mode=0o700, parents=True, exist_ok=True)  # needed on other machines without a shared folder
    return RunDir(agreed)
