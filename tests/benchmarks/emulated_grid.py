"""Step times of a grid of jobs on emulated clusters: measured, against their predictions and simulations. Linux only.

python tests/benchmarks/emulated_grid.py measure FILE [seconds]
python tests/benchmarks/emulated_grid.py report FILE

`measure` runs one job after another and appends a line of JSON for each to FILE, until all have run three times or the
seconds are over; called again, it goes on. `report` predicts and simulates each combination and prints them beside the
measurements, with the spread from run to run: the median |deviation| of single runs from their median. So a change of
the formulas needs no new runs. Computation is emulated (150 ms of passes per step), so that eight nodes fit on few
cores. The constants are those that `ss.predict` takes; none of these jobs must have been used to fit them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._emulated_runs import JobOf, measure, print_report, results

METHODS = (
    ("ring", "none"), ("parameter-server", "none"), ("zero-2", "none"), ("pipeline", "none"), ("ring", "int8")
)  # fmt: skip
NODES, RATES, WIDTHS = (2, 4, 8), ("100 Mbit/s", "1 Gbit/s"), (96, 192, 384)
LAYERS, SAMPLES, MICRO_BATCHES = 8, 8, 8
COMPUTE_S = 0.15
"""Time of the passes of one worker in a step, or of the passes of a pipeline without its bubble."""
STEPS = 8


class Case(NamedTuple):
    """One combination."""

    strategy: str
    compression: str
    nodes: int
    rate: str
    width: int

    @property
    def key(self) -> str:
        return " ".join(map(str, self))


def perceptron(width: int) -> Callable[[], Any]:
    """Return a function that builds eight layers; the loss takes the first ten outputs for the digits."""

    def build() -> Any:
        from torch import nn

        first = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
        return nn.Sequential(first, *(nn.Linear(width, width) for _ in range(LAYERS - 1)))

    build.__name__ = f"perceptron_{width}"
    return build


MODELS = {width: perceptron(width) for width in WIDTHS}


def flops_of(width: int) -> float:
    """Return the FLOPs of the forward and backward pass of one worker's samples."""
    return 3 * 2 * SAMPLES * ((LAYERS - 1) * width**2 + 64 * width)


def job_of(case: Case) -> tuple[ss.Job, Any]:
    """Return the job of a combination, and its cluster."""
    flops = flops_of(case.width)
    batch = ss.Batch(global_batch=SAMPLES * case.nodes)
    strategy: Any = case.strategy
    if case.strategy == "pipeline":
        strategy, batch = ss.Pipeline(split="even"), ss.Batch(SAMPLES * MICRO_BATCHES, micro_batch=SAMPLES)
        flops *= MICRO_BATCHES / case.nodes
    job = ss.Job(
        model=MODELS[case.width], data="digits", strategy=strategy, world_size=case.nodes, batch=batch, steps=STEPS,
        compression=case.compression, optimizer=ss.Optimizer("sgd", lr=0.01), eval_every=None,
    )  # fmt: skip
    return job, ss.Cluster.emulated(case.nodes, case.rate, flops=flops / COMPUTE_S, memory_bandwidth="2 GB/s")


def cases() -> list[Case]:
    """All combinations, in an order that mixes them."""
    found = [Case(*method, *rest) for method, *rest in product(METHODS, NODES, RATES, WIDTHS)]
    random.Random(0).shuffle(found)
    return found


def jobs() -> dict[str, JobOf]:
    """Return all combinations by name, in an order that mixes them."""
    return {case.key: partial(job_of, case) for case in cases()}


def main() -> None:
    """Measure, or report."""
    task, file, *rest = sys.argv[1:]
    if task == "measure":
        measure(Path(file), jobs(), seconds=float(rest[0]) if rest else float("inf"))
    else:
        keys = [case.key for case in sorted(cases())]
        found = sorted(results(Path(file), jobs()), key=lambda each: keys.index(each.key))
        print_report(Path(file), found, dict.fromkeys(f"{a} {b}" for a, b in METHODS))


if __name__ == "__main__":
    main()
