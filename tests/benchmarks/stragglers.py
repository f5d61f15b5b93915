"""One rank at half speed: slow-down of each way to train, measured and by the formulas. Linux only.

python tests/benchmarks/stragglers.py [way ...]

The slow-down is that of samples per second whose gradients are used, relative to the same job on ranks of equal speed.
Nodes take 200 ms to compute a step, by sleeping, so that four of them fit on few cores. The last table has two fast and
two slow ranks: equal shares of the batch, shares by measured speed, and the optimum by these speeds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks.emulated_grid import perceptron
from shardscope.runlog.spans import phase_seconds
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.shares import samples_by_speed

RANKS, BATCH, STEPS = 4, 56, 22
WIDTH, LAYERS, COMPUTE_S = 96, 8, 0.2
WAYS: dict[str, dict[str, object]] = {
    "ring": {},
    "ssp": {"strategy": ss.ParameterServer(mode="ssp", staleness=4)},
    "async": {"strategy": "parameter-server:async"},
    "backup workers": {"strategy": ss.ParameterServer(backups=1)},
    "local SGD": {"compression": ss.Compression("local-sgd", every=3)},
    "work by speed": {"batch": ss.Batch(BATCH, shares="measured")},
}
SETTLED = 6
"""Steps at the start that are not counted: warm-up, and the measurement of shares."""


def job(**changes: object) -> ss.Job:
    fields = {
        "model": perceptron(WIDTH), "data": "digits", "strategy": "ring", "world_size": RANKS, "batch": BATCH,
        "steps": STEPS, **changes,
    }  # fmt: skip
    return ss.Job(**fields)


def cluster(slowdown: dict[int, float]) -> EmulatedCluster:
    table = ss.predict(job()).found.table
    flops = 3 * table.flops * BATCH / RANKS / COMPUTE_S
    return ss.Cluster.emulated(
        nodes=RANKS, bandwidth="1 Gbit/s", flops=flops, memory_bandwidth="1 GB/s", slowdown=slowdown
    )


def used_per_s(run: ss.Run) -> float:
    """Samples per second whose gradients are used, once the run has settled."""
    strategy = run.job.strategy
    if strategy.drift(RANKS) is None:
        each = run.job.batch.global_batch / run.job.num_data_ranks
        updates = [event for event in run.events("update") if event["step"] > 0]
        last = {rank: max(e["t"] for e in run.events("step") if e["rank"] == rank) for rank in range(RANKS)}
        first = [e["t"] for e in run.events("step") if e["step"] == 2]
        begin, end = max(first), min(last.values())
        used = sum(len(event["workers"]) for event in updates if begin < event["t"] <= end)
        return each * used / (end - begin)
    ends = run.metrics().query(f"step >= {SETTLED}").t.to_list()  # steps of ranks that rarely meet overlap
    whole = (len(ends) - 1) // run.job.compression.period * run.job.compression.period
    return run.job.batch.global_batch * whole / (ends[whole] - ends[0])


def measured(**changes: object) -> tuple[float, float, ss.Run, ss.Run]:
    """Measured and predicted slow-down, and both runs."""
    found, guess, runs = [], [], []
    for slowdown in ({}, {RANKS - 1: 2.0}):
        where = cluster(slowdown)
        run = ss.launch(job(**changes), where).wait(300)
        runs.append(run)
        found.append(used_per_s(run))
        guess.append(ss.predict(run.job, where).samples_per_s)
    return found[0] / found[1], guess[0] / guess[1], runs[0], runs[1]


def table(names: list[str]) -> None:
    print(f"One of {RANKS} ranks at half speed\n{'way':16} measured predicted  error  regained", flush=True)
    lost = None
    for name in names:
        slow, guess, _, run = measured(**WAYS[name])
        lost = slow - 1 if name == "ring" else lost
        regained = "" if lost is None else f"{1 - (slow - 1) / lost:8.0%}"
        print(
            f"{name:16} {slow:8.3f} {guess:9.3f} {slow / guess - 1:+6.1%}  {regained}  load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        if run.summary().straggler:
            print(f"{'':16} {run.summary().straggler}", flush=True)


def unlike() -> None:
    """Two fast and two slow ranks, the slow ones at half speed."""
    where = cluster({2: 2.0, 3: 2.0})
    times = {}
    for label, batch in (
        ("equal shares", ss.Batch(48)),
        ("by measured speed", ss.Batch(48, shares="measured")),
    ):
        run = ss.launch(job(batch=batch), where).wait(300)
        times[label] = median(run.metrics().query(f"step > {SETTLED}").step_time_s)
        told = run.summary().shares or "12, 12, 12, 12"
        print(f"{label:18} {1e3 * times[label]:6.1f} ms a step, samples {told}", flush=True)
        per_sample = seconds_per_sample(run)
        best = samples_by_speed(48, [1 / each for each in per_sample])
        passes = max(count * each for count, each in zip(best, per_sample, strict=True))
        own = [s * e for s, e in zip(map(int, told.split(",")), per_sample, strict=True)]
        print(
            f"{'':18} slowest rank computes {1e3 * max(own):.1f} ms; optimum by measured speeds {1e3 * passes:.1f} ms"
        )


def seconds_per_sample(run: ss.Run) -> list[float]:
    """Median computing time of each rank for a sample, over the settled steps."""
    rows: dict[int, list[float]] = {}
    for event in run.events("step"):
        if event["step"] > SETTLED:
            phases = phase_seconds(event["spans"])
            rows.setdefault(event["rank"], []).append(
                (phases["forward"] + phases["backward"]) / event["samples"]
            )
    return [median(rows[rank]) for rank in range(RANKS)]


def main() -> None:
    """Measure the ways that are named, or all."""
    table(sys.argv[1:] or list(WAYS))
    if not sys.argv[1:]:
        unlike()


if __name__ == "__main__":
    main()
