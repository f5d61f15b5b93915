"""Step times of jobs on this machine: predicted by `ss.predict(job)` beside measured, none of them fitted.

Run it as ``python tests/benchmarks/job_time.py`` on a quiet machine: the medians of seven steps, and the ratios.
"""

from __future__ import annotations

import tempfile
from statistics import mean, median
from typing import Any

import shardscope as ss

SETTLED, STEPS = 3, 10
TEXT, IMAGES = "python-source", "digits"
JOBS: list[dict[str, Any]] = [
    {"model": "mlp", "data": IMAGES, "strategy": "ring", "world_size": 4, "batch": 64},
    {"model": "gpt-nano", "data": TEXT, "strategy": "ring", "world_size": 4, "batch": 32},
    {"model": "gpt-nano", "data": TEXT, "strategy": "zero-3", "world_size": 4, "batch": 32},
    {"model": "gpt-nano", "data": TEXT, "strategy": "pipeline", "world_size": 4, "batch": 32},
    {"model": "gpt-micro", "data": TEXT, "strategy": "all-reduce", "batch": 16},
    {"model": "gpt-micro", "data": TEXT, "strategy": "tree", "world_size": 3, "batch": 24},
    {"model": "gpt-nano", "data": TEXT, "strategy": "zero-1", "batch": 32},
    {"model": "cnn", "data": IMAGES, "strategy": "gossip", "batch": 256},
    {"model": "gpt-micro", "data": TEXT, "strategy": "zero-2", "batch": 16},
    {"model": "resnet", "data": IMAGES, "strategy": "all-reduce", "batch": 128},
    {"model": "gpt-mini", "data": TEXT, "strategy": "tree", "batch": 16},
    {"model": "gpt-nano", "data": TEXT, "strategy": "ring", "batch": 32, "compression": "topk"},
    {"model": "gpt-micro", "data": TEXT, "strategy": "ring", "batch": 16, "precision": "bf16-mixed"},
    {"model": "gpt-micro", "data": TEXT, "strategy": "zero-3", "batch": 16, "recompute": "full"},
    {"model": "gpt-small", "data": TEXT, "strategy": "ring", "batch": 4},
    {"model": "mlp", "data": IMAGES, "strategy": "zero-1", "batch": 512, "optimizer": "lamb"},
]


def measured(job: ss.Job, root: str) -> float:
    """Seconds of a step on the rank that takes longest."""
    events = ss.launch(job, root=root).wait(300).events("step")
    slowest: dict[int, float] = {}
    for event in events:
        slowest[event["step"]] = max(slowest.get(event["step"], 0.0), event["step_time_s"])
    return median(seconds for step, seconds in slowest.items() if step > SETTLED)


def main() -> None:
    """Print a line for each job, and how far predictions are off."""
    ratios = []
    with tempfile.TemporaryDirectory(prefix="shardscope-job-time-") as root:
        for fields in JOBS:
            job = ss.Job(steps=STEPS, **fields)
            predicted, found = ss.predict(job).step_time_s, measured(job, root)
            ratios.append(predicted / found)
            print(
                f"{job.label:32} {job.world_size} ranks  predicted {predicted * 1e3:7.1f} ms  measured "
                f"{found * 1e3:7.1f} ms  ratio {ratios[-1]:.2f}"
            )
    off = mean(abs(ratio - 1) for ratio in ratios)
    print(
        f"predicted / measured: median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}, MAPE {off:.0%}"
    )


if __name__ == "__main__":
    main()
