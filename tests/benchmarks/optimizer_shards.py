"""LAMB against torch's fused AdamW on the shards of ZeRO-3: each step with its collectives, on real ranks.

    python tests/benchmarks/optimizer_shards.py [world_size]

The optimizers take turns on one group of ranks, over shared memory where the machine has it. All ranks start a step
together, and it has ended when the slowest rank has; otherwise the ranks of an optimizer without collectives would run
ahead, and the next one would pay for the wait. Beside the time is the processor time of all ranks, which depends less
on what else the machine does. "torch" is LAMB without its compiled loop, as on a machine without numba.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks.transports import Sample, report, timed
from benchmarks.zero import trainer
from conformance.ranks import RankPool
from shardscope.training.context import RankContext

ROUNDS, STEPS_IN_A_ROW = 21, 3
BASELINE = "AdamW fused"
BARS = {"Lamb": 2.0, "Lamb, clipped": 2.5}
OPTIMIZERS = {
    BASELINE: (ss.Optimizer("adamw"), "auto"),
    "Lamb": (ss.Optimizer("lamb"), "auto"),
    "Lamb, clipped": (ss.Optimizer("lamb", max_grad_norm=1e-3), "auto"),
    "Lamb torch": (ss.Optimizer("lamb"), "fused"),
    "Lamb torch, clipped": (ss.Optimizer("lamb", max_grad_norm=1e-3), "fused"),
}


def update_of(context: RankContext, spec: ss.Optimizer, form: str) -> Callable[[], object]:
    """An optimizer's step alone, on this rank's shards."""
    one = trainer(context, "zero-3", optimizer=spec)
    if spec.name == "lamb":
        one.optimizer.form = form
    one.take_step(1)
    return one.optimizer.step


def measure(context: RankContext) -> tuple[dict[str, list[Sample]], dict[str, int]]:
    """This rank's samples, and how many collectives a step takes."""
    steps = {name: update_of(context, *each) for name, each in OPTIMIZERS.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    collectives = {}
    for name, step in steps.items():
        context.meter.drain()
        step()
        collectives[name] = sum(row["calls"] for row in context.meter.drain()[0].values())
    for _ in range(ROUNDS):
        for name, step in steps.items():
            samples[name].append(timed(step, STEPS_IN_A_ROW))
    return samples, collectives


def main() -> None:
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    pool = RankPool(world_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            ranks = pool.run(measure, Path(folder))
    finally:
        pool.close()
    print(f"{world_size} ranks, load {os.getloadavg()[0]:.1f}; bars {BARS}")
    joined = {
        name: [
            Sample(max(s.wall for s in turn), sum(s.cpu for s in turn))
            for turn in zip(*(samples[name] for samples, _ in ranks), strict=True)
        ]
        for name in OPTIMIZERS
    }
    report("ZeRO-3 shards", joined, BASELINE)
    print("collectives: " + ", ".join(f"{name} {count}" for name, count in ranks[0][1].items()))
    for name, bar in BARS.items():
        ratio = statistics.median(
            one.wall / other.wall for one, other in zip(joined[name], joined[BASELINE], strict=True)
        )
        print(f"{name}: {ratio:.2f} x {BASELINE}, bar {bar:g}: {'met' if ratio <= bar else 'MISSED'}")


if __name__ == "__main__":
    from benchmarks.optimizer_shards import main as run  # the ranks import this module by its name

    run()
