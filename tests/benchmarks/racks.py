"""Collectives over slow uplinks of racks, and over one slow link: predicted, simulated and measured. Linux only.

python tests/benchmarks/racks.py [racks | slow-link] [megabytes ...]

Four nodes have links of 200 Mbit/s; either the uplinks of the two racks have a quarter of that, or the link of the last
node. Nodes take 150 ms to compute a step, by sleeping. The figures are those of the communication in a step.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks.emulated_grid import COMPUTE_S, LAYERS, SAMPLES, flops_of, perceptron
from shardscope.errors import LaunchError
from shardscope.spec.cluster import EmulatedCluster

WAYS = {
    "ring": "ring",
    "hierarchical by rack": ss.Hierarchical(per_node=2),
    "tree": ss.Tree(slice_mb=0.25),
    "parameter server": "parameter-server",
    "gossip": ss.Gossip(measure_every=1000),
}
FAST, SLOW = "200 Mbit/s", "50 Mbit/s"
NETWORKS: dict[str, dict[str, object]] = {
    "racks": {"racks": 2, "rack_bandwidth": SLOW},
    "slow-link": {"node_bandwidth": {3: SLOW}},
}
STEPS, REPEATS = 6, 2


def width_of(megabytes: float) -> int:
    """Return the width of the layers of a model with gradients of this size."""
    return round((megabytes * 1e6 / 4 / (LAYERS - 1)) ** 0.5)


def cluster_of(width: int, network: dict[str, object]) -> EmulatedCluster:
    return ss.Cluster.emulated(
        4, FAST, flops=flops_of(width) / COMPUTE_S, memory_bandwidth="2 GB/s", **network
    )


def measure(strategy: object, width: int, network: dict[str, object]) -> tuple[float, float, float, float]:
    """Return the communication of a step in seconds: predicted, simulated, measured, and its spread from run to run.

    It is the step time less what the nodes state for computing, by sleeping.
    """
    job = ss.Job(
        model=perceptron(width), data="digits", strategy=strategy, world_size=4, batch=4 * SAMPLES, steps=STEPS,
        optimizer=ss.Optimizer("sgd", lr=0.01), eval_every=None,
    )  # fmt: skip
    cluster = cluster_of(width, network)
    predicted, simulated = ss.predict(job, cluster), ss.simulate(job, cluster)
    sending_s = predicted.time["communication"].value
    computing_s = predicted.step_time_s - sending_s
    runs = [ss.launch(job, cluster, made_by="racks").wait(300) for _ in range(REPEATS)]
    times = [run.summary().step_time_s - computing_s for run in runs]
    measured = statistics.median(times)
    spread = statistics.median(abs(each / measured - 1) for each in times)
    return sending_s, simulated.step_time_s - computing_s, measured, spread


def main() -> None:
    """Measure all ways with gradients of the given sizes, on both networks or the named one."""
    named = [name for name in sys.argv[1:] if name in NETWORKS] or [*NETWORKS]
    sizes = [float(size) for size in sys.argv[1:] if size not in NETWORKS] or [1.0, 4.0]
    worst = {"predicted": 0.0, "simulated": 0.0}
    for title, network in ((name, NETWORKS[name]) for name in named):
        print(f"{title}\n{'way':22}   MB  measured  spread  predicted  simulated", flush=True)
        for size in sizes:
            for way, strategy in WAYS.items():
                try:
                    predicted, simulated, measured, spread = measure(strategy, width_of(size), network)
                except LaunchError as error:
                    print(f"skipped: {error}")
                    return
                errors = (predicted / measured - 1, simulated / measured - 1)
                worst = {name: max(worst[name], abs(each)) for name, each in zip(worst, errors, strict=True)}
                print(
                    f"{way:22} {size:4g} {1e3 * measured:6.0f} ms {spread:7.1%} {errors[0]:+10.1%} {errors[1]:+10.1%}"
                    f"  load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )  # fmt: skip
    print(f"worst |error|: predicted {worst['predicted']:.1%}, simulated {worst['simulated']:.1%}")


if __name__ == "__main__":
    main()
