"""Pipelines on slow links: steps as measured, predicted and simulated, by schedule and length of a message. Linux only.

    python tests/benchmarks/pipeline_messages.py [schedule ...]

Four nodes compute at a stated speed, by sleeping: a forward pass takes 40 ms, and the message with its result 12 or
40 ms. Messages that cross on a link take longer than stated over TCP, whose acknowledgements queue behind the other's.
"""

from __future__ import annotations

import sys
from typing import Any

import shardscope as ss

RANKS, MICRO_BATCHES, SAMPLES, WIDTH, LAYERS = 4, 8, 160, 512, 8
FORWARD_S = 0.04
MESSAGES = (0.3, 1.0)
"""Time of a message, relative to that of a forward pass of one micro-batch on a rank."""


def layers() -> Any:
    """Layers of equal width; the first has fewer inputs."""
    from torch import nn

    first = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH))
    return nn.Sequential(first, *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS - 1)))


def measure(schedule: str, message: float) -> None:
    """Print the row of one schedule."""
    flops = LAYERS // RANKS * 2 * SAMPLES * WIDTH**2 / FORWARD_S
    rate = SAMPLES * WIDTH * 4 / (message * FORWARD_S)
    cluster = ss.Cluster.emulated(nodes=RANKS, bandwidth=rate, flops=flops, memory_bandwidth="1 GB/s")
    strategy: Any = ss.Pipeline(schedule=schedule, split="even")
    batch = ss.Batch(global_batch=SAMPLES * MICRO_BATCHES, micro_batch=SAMPLES)
    job = ss.Job(model=layers, data="digits", strategy=strategy, world_size=RANKS, batch=batch, steps=6)
    measured = ss.launch(job, cluster).wait(120).summary().step_time_s
    predicted, simulated = ss.predict(job, cluster).step_time_s, ss.simulate(job, cluster).step_time_s
    assert measured is not None
    assert predicted is not None
    print(
        f"message {message:.1f} x forward, {schedule:12} measured {measured:.3f} s; predicted {predicted:.3f} s "
        f"({predicted / measured:.2f}), simulated {simulated:.3f} s ({simulated / measured:.2f})",
        flush=True,
    )


if __name__ == "__main__":
    for part in MESSAGES:
        for name in sys.argv[1:] or ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-min"):
            measure(name, part)
