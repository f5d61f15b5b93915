"""The bubble of every pipeline schedule, measured on an emulated cluster, against the schedule's count. Linux only.

python tests/benchmarks/emulated_pipelines.py [milliseconds of a stage] [schedule ...]

Each node computes at a stated speed, by sleeping, so that a forward pass of a stage takes 30 ms although all nodes
share this machine's cores. All stages have the same layers. The bubble is the fraction of the time from the first to
the last pass of a step in which ranks run no pass, as a median over steps. "Time" is the ratio of that time to the
schedule's, which knows no messages; passes follow one another without gaps unless they wait for a message.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import shardscope as ss
from shardscope.measure.pipeline_waits import pipeline_waits
from shardscope.spec.layout import schedule_names

RANKS, MICRO_BATCHES, SAMPLES, WIDTH = 4, 8, 8, 64
LAYERS = 8
STAGE_S = 0.03
STEPS = 8


def layers() -> Any:
    """Equal layers; the loss takes the first ten outputs for the digits, and the others never occur."""
    from torch import nn

    first = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(first, *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS - 1)))


def measure(name: str, stage_s: float) -> tuple[float, float]:
    """Print one schedule's row, and return the bubble's excess and the ratio of the passes' time to the schedule's."""
    strategy: Any = ss.Pipeline(schedule=name, split="even")
    per_stage = LAYERS // (RANKS * strategy.stages_per_rank)
    flops = per_stage * 2 * SAMPLES * WIDTH**2 / stage_s
    cluster = ss.Cluster.emulated(nodes=RANKS, bandwidth="1 Gbit/s", flops=flops, memory_bandwidth="1 GB/s")
    batch = ss.Batch(global_batch=SAMPLES * MICRO_BATCHES, micro_batch=SAMPLES)
    job = ss.Job(model=layers, data="digits", strategy=strategy, world_size=RANKS, batch=batch, steps=STEPS)
    run = ss.launch(job, cluster).wait(120)
    waits, summary, expected = pipeline_waits(run.events(), job), run.summary(), ss.predict(job, cluster)
    assert waits is not None
    assert summary.step_time_s is not None
    assert expected.step_time_s is not None
    excess, time = waits.waiting - waits.bubble, (1 - waits.bubble) / (1 - waits.waiting)
    print(
        f"{name:12} bubble: measured {waits.waiting:6.2%}, schedule {waits.bubble:6.2%}, {100 * excess:+5.2f} points; "
        f"time {time:5.3f} x; step: measured {summary.step_time_s:6.3f} s, predicted {expected.step_time_s:6.3f} s, "
        f"simulated {ss.simulate(job, cluster).step_time_s:6.3f} s; late {1e3 * (summary.late_s_per_step or 0):.1f} ms",
        flush=True,
    )
    return excess, time


def main() -> None:
    """Measure the schedules that are named, or all."""
    words = sys.argv[1:]
    stage_s = float(words.pop(0)) / 1e3 if words and words[0].isdigit() else STAGE_S
    names = words or list(schedule_names())
    print(
        f"{RANKS} nodes on {os.cpu_count()} cores, {MICRO_BATCHES} micro-batches, load {os.getloadavg()[0]:.1f}"
    )
    found = [measure(name, stage_s) for name in names]
    print(f"largest: bubble {100 * max(found)[0]:+.2f} points, time {max(time for _, time in found):.3f} x")


if __name__ == "__main__":
    main()
