"""A step of ZeRO with our ring against stock FSDP2, and of LAMB against torch's fused AdamW on FSDP2's shards.

    python tests/benchmarks/zero.py [world_size]

Everything runs in one group of ranks, interleaved. "stock" is the same strategy with ``collectives="backend"``: plain
`fully_shard` on gloo. The collectives of an optimizer's step are counted by the meter.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._report import compare
from conformance.ranks import RankPool
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

HIDDEN, LAYERS, ROWS = 1024, 12, 8
ROUNDS = 15
BARS = {"zero-3": 0.6, "zero-2": 0.7}


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


def step_of(context: RankContext, strategy: str) -> Callable[[], object]:
    """One training step."""
    one = trainer(context, strategy, optimizer=ss.Optimizer("sgd", momentum=0.0))
    return lambda: one.take_step(1)


def update_of(
    context: RankContext, optimizer: ss.Optimizer
) -> tuple[Callable[[], object], Callable[[], int]]:
    """An optimizer's step alone, on the shards of ZeRO-3, and how many collectives one takes."""
    one = trainer(context, "zero-3", optimizer=optimizer)
    one.take_step(1)

    def count() -> int:
        context.meter.drain()
        one.optimizer.step()
        return sum(row["calls"] for row in context.meter.drain()[0].values())

    return one.optimizer.step, count


def measure(context: RankContext, stage: str | None) -> str:
    """One table, as text."""
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        if stage:
            calls = {
                f"{stage} stock": step_of(context, f"{stage}:backend"),
                f"{stage} ring": step_of(context, stage),
                "all-reduce": step_of(context, "all-reduce"),
            }
            compare(calls, rounds=ROUNDS, baseline=f"{stage} stock")
        else:
            updates = {
                "AdamW fused": update_of(context, ss.Optimizer("adamw")),
                "Lamb": update_of(context, ss.Optimizer("lamb")),
                "Lamb, clipped": update_of(context, ss.Optimizer("lamb", max_grad_norm=1.0)),
            }
            compare(
                {name: step for name, (step, _) in updates.items()}, rounds=ROUNDS, baseline="AdamW fused"
            )
            for name, (_, count) in updates.items():
                print(f"{name}: {count()} collectives")
    return table.getvalue()


def main() -> None:
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    pool = RankPool(world_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for stage in [*BARS, None]:
                tables = pool.run(lambda context, stage=stage: measure(context, stage), Path(folder))
                bar = f", bar {BARS[stage]:g}" if stage else ", bars 3 and at most 2 collectives"
                print(f"\n{stage or 'optimizers'}, {world_size} ranks{bar}\n{tables[0]}", end="", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    from benchmarks.zero import main as run  # the ranks import this module by its name

    run()
