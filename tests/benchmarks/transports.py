"""Shared memory against TCP between the ranks of this machine: collectives, and steps of real jobs.

    python tests/benchmarks/transports.py [world_size] [cuda]

With `cuda`, the ranks are on GPUs: CUDA IPC against gloo, or against NCCL if each rank has a GPU.

Each transport has its own ranks, which sleep while those of the other are timed, so both are measured in one run, by
turns. Beside the time is the processor time of all ranks, which depends less on what else the machine does.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from conformance.ranks import RankPool
from shardscope.training.collectives import RingAllReduce
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

SIZES = {"10 kB": 10_000, "100 kB": 100_000, "1 MB": 1_000_000, "16 MB": 16_000_000, "64 MB": 64_000_000}
ROUNDS = 9
SECONDS_IN_A_ROW = 0.05
STEPS_IN_A_ROW = 20
ALONE = "one process"
STRATEGIES = ("ring", "all-reduce", "zero-2", "zero-3", "pipeline")
_kept: dict[str, Any] = {}
"""What a rank keeps between two of its turns."""


@dataclass(frozen=True)
class Sample:
    """Seconds of one call on the slowest rank, and processor seconds of one call on all ranks."""

    wall: float
    cpu: float


TRANSPORTS = {"cpu": ("tcp", "shm"), "cuda": ("tcp", "cuda-ipc")}


def pools_of(world_size: int, device: str) -> dict[str, RankPool]:
    """Ranks for each transport of a kind of device."""
    return {name: RankPool(world_size, transport=name, device=device) for name in TRANSPORTS[device]}


def timed(call: Callable[[], object], times: int) -> Sample:
    """Time calls on this rank, all ranks starting together."""
    if dist.is_initialized():
        dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(times):
        call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return Sample((time.perf_counter() - wall) / times, (time.process_time() - cpu) / times)


def collective(context: RankContext, name: str, size: int) -> Sample:
    """One turn of an all-reduce: the transport's own, or the ring."""
    tensor = torch.zeros(size // 4, device=context.device)
    ring = RingAllReduce(context.group)

    def around() -> None:
        sent = tensor.cpu() if context.is_staged(size, rounds=2 * (context.world_size - 1)) else tensor
        tensor.copy_(ring.all_reduce_(sent))

    call = {"all-reduce": lambda: dist.all_reduce(tensor), "ring": around}[name]
    call()
    one = torch.tensor(timed(call, 1).wall, device=context.device)
    dist.broadcast(one, src=0)
    return timed(call, max(1, int(SECONDS_IN_A_ROW / max(one.item(), 1e-6))))


def steps(context: RankContext, strategy: str) -> Sample:
    """One turn of training steps, on a single rank without a strategy; the first turn of a job warms it up."""
    strategy = strategy if context.world_size > 1 else "single"
    if _kept.get("strategy") != strategy:
        job = ss.Job(
            model="mlp", data="digits", batch=64, strategy=strategy, world_size=context.world_size, steps=10**6
        )  # fmt: skip
        if "trainer" in _kept:
            _kept["trainer"].strategy.close()
        _kept.update(strategy=strategy, trainer=Trainer(job, context, context.events.path.parent), step=0)
        timed(_step, STEPS_IN_A_ROW)
    return timed(_step, STEPS_IN_A_ROW)


def _step() -> None:
    _kept["step"] += 1
    _kept["trainer"].take_step(_kept["step"])


def by_turns(pools: Mapping[str, RankPool], turn: Callable[[RankContext], Sample]) -> dict[str, list[Sample]]:
    """Samples of each pool."""
    samples: dict[str, list[Sample]] = {name: [] for name in pools}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, pool in pools.items():
                ranks = pool.run(turn, Path(folder))
                samples[name].append(Sample(max(r.wall for r in ranks), sum(r.cpu for r in ranks)))
    return samples


def report(title: str, samples: Mapping[str, list[Sample]], baseline: str) -> None:
    """Print medians, and the medians of the ratios to the baseline in the same round."""
    for name, taken in samples.items():
        cells = []
        for kind, label in (("wall", "time"), ("cpu", "cpu")):
            times, base = ([getattr(sample, kind) for sample in each] for each in (taken, samples[baseline]))
            ratio = statistics.median(time / other for time, other in zip(times, base, strict=True))
            cells.append(f"{label:>6} {1e3 * statistics.median(times):9.3f} ms {ratio:6.2f} x {baseline}")
        print(f"{title:<18} {name:<12}{'  '.join(cells)}", flush=True)


def main() -> None:
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    pools = pools_of(world_size, device)
    alone = {ALONE: RankPool(1, device=device)}
    print(f"{world_size} ranks on {device}")
    try:
        for name in ("all-reduce", "ring"):
            for label, size in SIZES.items():
                turn = partial(collective, name=name, size=size)
                report(f"{name} {label}", by_turns(pools, turn), "tcp")
        for strategy in STRATEGIES:
            report(strategy, by_turns({**pools, **alone}, partial(steps, strategy=strategy)), ALONE)
    finally:
        for pool in [*pools.values(), *alone.values()]:
            pool.close()


if __name__ == "__main__":
    from benchmarks.transports import main as run  # the ranks import this module by its name

    run()
