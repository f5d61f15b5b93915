"""The time in which no rank trains while the number of ranks changes: 2, 4, 3 and 2 ranks in one run.

    python tests/benchmarks/resize.py [model]

From the end of the last step on one number of ranks to the start of the first on the other: saving the checkpoint,
ending the ranks, starting others from warm processes, building the model, and loading. A sleep delays each step.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from conformance.elastic import elastic_job, resized

ROUNDS = 3
STRATEGIES = ("ring", "all-reduce", "zero-1", "zero-3", "pipeline:1f1b")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "mlp"
    data = "digits" if model in ("mlp", "cnn") else "python-source"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDSCOPE_RUNS"] = folder
        resized(elastic_job(model=model, data=data), 4)  # the launch server has imported everything now
        print(
            f"seconds without training, {model}, {len(os.sched_getaffinity(0))} cores, median of {ROUNDS} runs"
        )
        for strategy in STRATEGIES:
            job = elastic_job(model=model, data=data, strategy=strategy)
            rounds = [resized(job, 4, 3, 2).reduced().resizes for _ in range(ROUNDS)]
            for resizes in zip(*rounds, strict=True):
                pause = statistics.median(each.pause_s for each in resizes)
                print(f"{strategy:<14} {resizes[0].before} -> {resizes[0].after}  {pause:5.2f}")
        ss.runtime.shut_down()


if __name__ == "__main__":
    main()
