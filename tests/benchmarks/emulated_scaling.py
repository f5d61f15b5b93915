"""Weak scaling on emulated nodes of stated speed, measured, by the formulas and simulated. Linux only.

python tests/benchmarks/emulated_scaling.py [strategy ...]

The efficiency is the step time of one worker divided by that of W workers with the same batch per worker. Nodes take
300 ms to compute a step, by sleeping, so that eight of them fit on few cores; their links have 200 Mbit/s.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks.emulated_grid import SAMPLES, flops_of, perceptron

WIDTH = 192
COMPUTE_S = 0.3

WORKERS = (1, 2, 4, 8)
STRATEGIES = ("ring", "parameter-server", "zero-2", "zero-3", "hierarchical")
STEPS = 12


def measure(strategy: str) -> float:
    """Print one strategy's table, and return its largest difference from the formula's efficiency, in points."""
    job = ss.Job(
        model=perceptron(WIDTH), data="digits", strategy=strategy, world_size=2, batch=2 * SAMPLES, steps=STEPS,
        eval_every=None,
    )  # fmt: skip
    per_node = 2 if strategy == "hierarchical" else 1
    cluster = ss.Cluster.emulated(
        bandwidth="200 Mbit/s",
        per_node=per_node,
        flops=flops_of(WIDTH) / COMPUTE_S,
        memory_bandwidth="1 GB/s",
    )
    found = ss.scaling(job, WORKERS, cluster=cluster)
    print(f"{found!r}\nload {os.getloadavg()[0]:.1f}", flush=True)
    measured, *guesses = (found.efficiencies(time) for time in ("measured_s", "predicted_s", "simulated_s"))
    points = [
        max(
            abs(100 * (a - b))
            for a, b in zip(measured, guess, strict=True)
            if a is not None and b is not None
        )
        for guess in guesses
    ]
    print(
        f"{strategy}: largest difference {points[0]:.1f} points predicted, {points[1]:.1f} simulated\n",
        flush=True,
    )
    return points[0]


def main() -> None:
    """Measure the strategies that are named, or all."""
    found = [measure(name) for name in sys.argv[1:] or STRATEGIES]
    print(f"largest difference from the formula: {max(found):.1f} points")


if __name__ == "__main__":
    main()
