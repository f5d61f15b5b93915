"""A step of ZeRO against stock FSDP2 on gloo.

    python tests/benchmarks/zero.py [world_size] [cuda]

"stock" is plain `fully_shard` with its own collectives on gloo (on NCCL if each rank has a GPU), trained by a bare
loop. Ranks over TCP and ranks over shared memory, or CUDA IPC, take turns. "ring" is a step over the latter whose
shards go around a ring, as they do where messages are delayed, instead of through shared buffers. Beside the time is
the processor time of all ranks, which depends less on what else the machine does.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks.transports import TRANSPORTS, Sample, pools_of, report, timed
from conformance.ranks import RankPool
from shardscope.methods.strategies.sharded import FullyShardedStrategy
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

HIDDEN, LAYERS, ROWS = 1024, 12, 8
ROUNDS, STEPS_IN_A_ROW = 9, 5
STOCK = "stock FSDP2"
BARS = {"zero-3": 0.45, "zero-2": 0.5}


def make_model() -> nn.Module:
    """An MLP of 12.6 M parameters."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()) for _ in range(LAYERS)))


def make_data() -> tuple[object, object]:
    """Random rows."""
    rows = torch.randn(1024, HIDDEN, generator=torch.Generator().manual_seed(0))
    return (rows, rows), (rows[:8], rows[:8])


def trainer(context: RankContext, strategy: str, **changes: object) -> Trainer:
    """A training of that model under `strategy`."""
    job = ss.Job(
        model=make_model, data=make_data, loss="mse", strategy=strategy, world_size=context.world_size,
        batch=ROWS * context.world_size, steps=10**6, **changes,
    )  # fmt: skip
    return Trainer(job, context, context.events.path.parent)


def stock_step(context: RankContext, strategy: str) -> Callable[[], object]:
    """One step of plain `fully_shard` on every layer and on the model, on gloo."""
    from torch.distributed.fsdp import fully_shard

    group, ranks = dist.new_group(backend=context.group.backend), range(context.world_size)
    mesh = DeviceMesh.from_group(group, context.device.type, mesh=torch.tensor(ranks))
    torch.manual_seed(0)
    model = make_model().to(context.device)
    for unit in [*model, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=strategy == "zero-3")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(ROWS, HIDDEN, device=context.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(rows), rows).backward()
        optimizer.step()

    return step


def step_of(context: RankContext, strategy: str) -> Callable[[], object]:
    """One training step."""
    one = trainer(context, strategy, optimizer=ss.Optimizer("sgd", momentum=0.0))
    return lambda: one.take_step(1)


def ring_step(context: RankContext, strategy: str) -> Callable[[], object]:
    """One training step whose shards go around a ring, although the ranks could share buffers."""
    with mock.patch.object(
        FullyShardedStrategy, "why_ring", lambda *_, **__: "the benchmark compares with one"
    ):
        return step_of(context, strategy)


_kept: dict[str, Callable[[], object]] = {}
"""The step that each rank takes in its turns, by name."""


def turn(context: RankContext, name: str, stage: str) -> Sample:
    """One turn of steps of one stage; the first one also builds the model and warms up."""
    key = f"{name} {stage}"
    if key not in _kept:
        _kept.clear()
        _kept[key] = {"stock": stock_step, "ours": step_of, "ring": ring_step}[name.split(maxsplit=1)[0]](
            context, stage
        )
        timed(_kept[key], 3)
    return timed(_kept[key], STEPS_IN_A_ROW)


def main() -> None:
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    ours = {f"ours over {name}": pool for name, pool in pools_of(world_size, device).items()}
    sharing = TRANSPORTS[device][-1]
    pools = {
        STOCK: RankPool(world_size, transport="tcp", device=device),
        **ours,
        f"ring over {sharing}": RankPool(world_size, transport=sharing, device=device),
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            for stage, bar in BARS.items():
                samples: dict[str, list[Sample]] = {name: [] for name in pools}
                for _ in range(ROUNDS):
                    for name, pool in pools.items():
                        ranks = pool.run(partial(turn, name=name, stage=stage), Path(folder))
                        samples[name].append(Sample(max(r.wall for r in ranks), sum(r.cpu for r in ranks)))
                print(f"\n{stage}, {world_size} ranks, bar {bar:g} over shared memory")
                report(stage, samples, STOCK)
    finally:
        for pool in pools.values():
            pool.close()


if __name__ == "__main__":
    from benchmarks.zero import main as run  # the ranks import this module by its name

    run()
