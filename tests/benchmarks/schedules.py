"""How fast the closed forms score pipelines, and how long the Pipeline Explorer takes to follow a slider.

    python tests/benchmarks/schedules.py

The closed forms of a hundred thousand pipelines in one call are held against the same formulas called one by one in a
Python loop; the explorer's work is that of one slider's move with 8 ranks and 32 micro-batches.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks._report import compare
from shardscope.analytic.schedules import closed
from shardscope.spec.layout import schedule_names
from shardscope_widgets import PipelineExplorer

MANY, FEW = 1_000_000, 1_000


def closed_forms() -> None:
    rng = np.random.default_rng(0)
    rows = (
        rng.integers(0, len(schedule_names()), MANY),
        rng.integers(1, 65, MANY),
        rng.integers(64, 513, MANY),
        rng.integers(1, 5, MANY),
        *rng.uniform(0.5, 2, (3, MANY)),
    )
    few = [[column[i] for column in rows] for i in range(FEW)]
    timings = compare(
        {
            "loop of 1,000": lambda: [closed.bubble_time(*row) for row in few],
            "1,000,000 at once": lambda: closed.bubble_time(*rows),
            "1,000,000 in flight": lambda: closed.in_flight(rows[0], 0, *rows[1:4]),
        },
        rounds=5,
        baseline="loop of 1,000",
        warm_up=1,
    )
    at_once, loop = timings["1,000,000 at once"].median_ms, timings["loop of 1,000"].median_ms
    print(
        f"{MANY / at_once / 1e3:.1f} million bubbles a second, {loop * MANY / FEW / at_once:.0f} times the loop"
    )


def sliders() -> None:
    explorers = {
        name: PipelineExplorer(schedule=name, stages=8, microbatches=32) for name in schedule_names()
    }
    compare(
        {name: lambda explorer=explorer: _move(explorer) for name, explorer in explorers.items()},
        rounds=10,
        baseline="1f1b",
    )


def _move(explorer: PipelineExplorer) -> None:
    explorer.t_input = explorer.t_input % 20 + 0.5


if __name__ == "__main__":
    closed_forms()
    sliders()
