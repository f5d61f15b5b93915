"""The time in which no rank trains while the number of ranks changes: 2, 4, 3 and 2 ranks in one run.

    python tests/benchmarks/resize.py [model or "wide" [strategy ...]]

From the end of the last step on one number of ranks to the start of the first on the other: saving the state to the
disk or to memory, ending the ranks, starting others from warm processes, building the model, and loading. A sleep
delays each step.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from conformance.elastic import elastic_job, resized
from conformance.light import wide
from shardscope.spec.units import bytes_text

ROUNDS = 3
STRATEGIES = ("ring", "all-reduce", "zero-1", "zero-3", "pipeline:1f1b")
WAYS = {"disk": None, "replica": ss.Recovery(1, replica_every=1000)}
"""Recovery of a job, by the source of the state after a resize."""


def main() -> None:
    name, *strategies = sys.argv[1:] or ["mlp"]
    model: Any = wide if name == "wide" else name
    data = "digits" if name in ("mlp", "cnn", "wide") else "python-source"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDSCOPE_RUNS"] = folder
        resized(elastic_job(model=model, data=data), 4)  # the launch server has imported everything now
        print(
            f"seconds without training, {name}, {len(os.sched_getaffinity(0))} cores, median of {ROUNDS} runs"
        )
        for strategy in strategies or STRATEGIES:
            for way, recovery in WAYS.items():
                job = elastic_job(model=model, data=data, strategy=strategy, recovery=recovery)
                runs = [resized(job, 4, 3, 2) for _ in range(ROUNDS)]
                for resizes in zip(*(run.reduced().resizes for run in runs), strict=True):
                    assert {each.source for each in resizes} == {way}
                    pause = statistics.median(each.pause_s for each in resizes)
                    print(f"{strategy:<14} {resizes[0].before} -> {resizes[0].after}  {way:<7}  {pause:5.2f}")
                print(f"{strategy:<14} saved   {way:<7}  {bytes_text(_saved_bytes(runs[0]))}", flush=True)
        ss.runtime.shut_down()


def _saved_bytes(run: ss.Run) -> float:
    """Return the bytes that the ranks saved for the first resize."""
    saved = [*run.events("checkpoint"), *run.events("replica")]
    first = min(event["step"] for event in saved)
    return float(sum(event["bytes"] for event in saved if event["step"] == first))


if __name__ == "__main__":
    main()
