"""A step of a training script within `ss.observe` against the same step without, interleaved in one run.

    python tests/benchmarks/observe.py [world_size]

Ranks of a script in plain torch train in short blocks, alternately alone and observed: one process without
`torch.distributed`, then DDP and FSDP2 on gloo. The first steps of a block warm up; one of them is measured by kind of
memory when observed, which the second ratio shows. By default every 50th step is.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shardscope as ss
from shardscope.training.models import build_model

ROUNDS, STEPS = 12, 10
MEASURED = 3
"""The step of a block whose memory is measured by kind (`Record.memory_first`)."""


def wrapped(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model("gpt-micro")
    if wrapper == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if wrapper == "FSDP2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


class Seconds(NamedTuple):
    """Seconds of one step: by the clock, and of the process's own work, which a busy machine does not lengthen."""

    wall: float
    cpu: float


def block(step: Callable[[], None]) -> list[Seconds]:
    """Seconds of each step; ranks start each together."""
    seconds = []
    for _ in range(MEASURED + STEPS):
        if dist.is_initialized():
            dist.barrier()
        start, started = time.perf_counter(), time.process_time()
        step()
        seconds.append(Seconds(time.perf_counter() - start, time.process_time() - started))
    return seconds


def median(steps: list[Seconds]) -> Seconds:
    return Seconds(*map(statistics.median, zip(*steps, strict=True)))


def compare(wrapper: str, root: Path) -> None:
    model = wrapped(wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = torch.randint(0, 256, (32, 65))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        loss.item()

    block(step)
    alone, observed, measured = [], [], []
    for _ in range(ROUNDS):
        alone.append(median(block(step)[MEASURED:]))
        with ss.observe(model, optimizer, root=root):
            steps = block(step)
        observed.append(median(steps[MEASURED:]))
        measured.append(steps[MEASURED - 1])
    if not dist.is_initialized() or dist.get_rank() == 0:
        wall, cpu = ratio(observed, alone)
        print(
            f"{wrapper:<12} {1e3 * median(alone).wall:8.1f} ms   {wall:.3f} x by the clock, {cpu:.3f} x of work when "
            f"observed   {ratio(measured, alone).cpu:.2f} x of work in a step that is measured by kind of memory",
            flush=True,
        )


def ratio(steps: list[Seconds], base: list[Seconds]) -> Seconds:
    """Median of the ratios within each round."""
    return median([Seconds(a.wall / b.wall, a.cpu / b.cpu) for a, b in zip(steps, base, strict=True)])


def on_rank(rank: int, world_size: int, port: int, root: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for wrapper in ("DDP", "FSDP2"):
        compare(wrapper, root)
    dist.destroy_process_group()


def main() -> None:
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        compare("one process", Path(folder))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(on_rank, (world_size, store.port, Path(folder)), nprocs=world_size)


if __name__ == "__main__":
    main()
