"""The largest batch at which SGD, AdamW, LARS and LAMB still reach a target in the same epochs, on both tasks.

    python tests/benchmarks/batch_scaling.py [digits] [text]

Real runs at 2 ranks; at every batch one seed looks for the rate and three others count. The target is what the worst of
the optimizers comes to at the smallest batch and a quarter more. (The first target, a tenth above the best of them, was
within what seeds alone differ by: no batch of AdamW's or LARS's reached it, while larger ones came as close as small.)
"""

from __future__ import annotations

import sys

import shardscope as ss
from shardscope.runtime import shut_down
from shardscope.tuning.sweep_result import BatchSweep, Cell

TASKS = {
    "digits": (ss.Job(model="mlp", data="digits", strategy="all-reduce", world_size=2, batch=32, steps=448),
               ss.PowersOfTwo(32, 1024), {"sgd": 0.1, "adamw": 3e-3, "lars": 3.0, "lamb": 1e-2}),
    "text": (ss.Job(model="gpt-nano", data="python-source", strategy="all-reduce", world_size=2, batch=16, steps=256),
             ss.PowersOfTwo(16, 256), {"sgd": 0.1, "adamw": 3e-3, "lars": 10.0, "lamb": 3e-2}),
}  # fmt: skip
"""Job, batches, rates at the job's batch: 10 epochs of digits, 4096 windows of text."""


def table(sweep: BatchSweep) -> str:
    """A row an optimizer and batch: the best rate, every seed."""
    rows = [
        f"{p.optimizer:8} {p.batch:5} {p.steps:5} steps  rate {p.rate:8.4g}  "
        f"{' '.join(f'{value:.4f}' for value in p.values):24} {'reached' if p.reaches(sweep.target) else '-'}"
        for p in sweep.points
    ]
    return "\n".join([*rows, str(sweep)])


def main() -> None:
    for name in sys.argv[1:] or TASKS:
        job, batches, rates = TASKS[name]
        print(name, job.label, flush=True)

        def said(cell: Cell) -> None:
            print(
                f"  {cell.optimizer} {cell.batch} rate {cell.rate:.4g} seed {cell.seed}: {cell.value}",
                flush=True,
            )

        sweep = ss.batch_sweep(
            job, batches=batches, rates=rates, name=f"batches-{name}", on_cell=said, thorough=True
        )
        print(table(sweep))
    shut_down()


if __name__ == "__main__":
    main()
