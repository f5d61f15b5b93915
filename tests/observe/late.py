"""Training scripts whose ranks do not know each other yet when they enter the block.

    python late.py launcher FOLDER      rank 0 starts rank 1 inside its block, as Lightning does
    python late.py spawn FOLDER         `torch.multiprocessing` starts both ranks, without any variables for torchrun

Each kind of script has its own folder of runs; rank r writes the warnings that it got to ``warnings-r.json``.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardscope as ss
from shardscope.runtime.observe import _place
from shardscope.runtime.observe._describe import Seen

STEPS = 2
kept: list[object] = []
"""Groups and their users: torch can deadlock if it frees gloo's group right after a backward pass."""
KINDS = ("late", "sanity pass", "refused", "on rank 1 only")


def train(rank: int, folder: Path, kind: str, model: nn.Module, start: Callable[[], None]) -> None:
    """Enter the block alone, join the other rank, and train."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ss.observe(model, optimizer, root=folder / kind):
        if kind == "sanity pass":
            model(torch.ones(3, 5)).sum().backward()
            optimizer.zero_grad()
        start()
        join(rank, folder / f"{kind}.store")
        wrapped = DistributedDataParallel(model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            wrapped(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
    leave(wrapped)


def join(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)


def leave(model: nn.Module) -> None:
    dist.barrier()
    kept.extend((model, dist.group.WORLD))
    dist.destroy_process_group()


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    got = Warnings()
    logging.getLogger("shardscope").addHandler(got)
    told = {}
    for kind in KINDS:
        job = Seen.job
        if kind == "refused" and rank == 0:
            Seen.job = refuse  # type: ignore[method-assign]
        _place._SHARE_S = 1.0 if kind == "on rank 1 only" else 60.0
        if kind == "on rank 1 only" and rank == 0:
            alone(rank, folder, kind)
        else:
            train(rank, folder, kind, nn.Linear(5, 2), lambda: None)
        Seen.job = job  # type: ignore[method-assign]
        told[kind] = got.messages
        got.messages = []
    (folder / f"warnings-{rank}.json").write_text(json.dumps(told))
    os._exit(0)


def alone(rank: int, folder: Path, kind: str) -> None:
    """Train as in `train`, without being observed."""
    join(rank, folder / f"{kind}.store")
    wrapped = DistributedDataParallel(nn.Linear(5, 2))
    for _ in range(STEPS):
        wrapped(torch.ones(4, 5)).square().mean().backward()
    leave(wrapped)


def refuse(_: Seen) -> None:
    raise RuntimeError("cannot be described")


class Warnings(logging.Handler):
    """Keeps the messages that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(how: str, folder: Path) -> None:
    if how == "spawn":
        mp.spawn(worker, (folder,), nprocs=2)
    elif "LOCAL_RANK" in os.environ:
        train(1, folder, how, nn.Linear(5, 2), lambda: None)
        os._exit(0)
    else:
        others: list[subprocess.Popen[bytes]] = []
        command, env = [sys.executable, *sys.argv], {**os.environ, "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        train(0, folder, how, nn.Linear(5, 2), lambda: others.append(subprocess.Popen(command, env=env)))
        os._exit(others[0].wait(200))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
