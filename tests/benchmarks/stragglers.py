"""One rank at half speed: slow-down of each way to train, measured and by the formulas. Linux only.

python tests/benchmarks/stragglers.py [way ... | jitter]

The slow-down is that of samples per second whose gradients are used, relative to the same job on ranks of equal speed.
Nodes take 200 ms to compute a step, by sleeping, so that four of them fit on few cores. The last table has two fast and
two slow ranks: equal shares of the batch, shares by measured speed, and the optimum by these speeds.

`jitter` predicts how long the slowest of 4,096 ranks computes, from the measured times of eight whose forward passes
sleep for random times of a known distribution.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks.emulated_grid import perceptron
from shardscope.measure.jitter import computing_times
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
EIGHT, FAR, PASS_S, WITHIN, BETWEEN = 8, 4096, 0.08, 0.08, 0.04
"""Ranks whose times are measured, and to which they are extrapolated; mean of a sleep, and its standard deviations from
step to step and between ranks, relative to it."""
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


def factor_of(kind: str, source: Any, between: float) -> float:
    """Return the factor of one computing time: that of its rank, which it keeps, and a random one, of mean 1."""
    if kind == "normal":
        return between * max(0.1, source.normal(1, WITHIN))
    return between * float(np.exp(WITHIN * source.standard_normal() - WITHIN**2 / 2))


def own_speeds(ranks: int, source: Any) -> Any:
    return np.exp(BETWEEN * source.standard_normal(ranks) - BETWEEN**2 / 2)


def jittery(kind: str) -> Callable[[], Any]:
    """Return a function that builds a small model whose forward pass sleeps for a random time."""

    def build() -> Any:
        import time

        from torch import nn

        rank = int(os.environ.get("RANK", "0"))
        own = float(own_speeds(EIGHT, np.random.default_rng(1))[rank])
        source = np.random.default_rng([2, rank])

        class Sleeping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

            def forward(self, x: Any) -> Any:
                if self.training:
                    time.sleep(PASS_S * factor_of(kind, source, own))
                return self.layers(x)

        return Sleeping()

    build.__name__ = f"jittery_{kind}"
    return build


def injected_slowest_s(kind: str, ranks: int, draws: int = 400) -> float:
    """Return the longest sleep among `ranks` ranks of different speeds, averaged over draws, in seconds."""
    source = np.random.default_rng(3)
    within = (
        source.normal(1, WITHIN, (draws, ranks))
        if kind == "normal"
        else np.exp(WITHIN * source.standard_normal((draws, ranks)) - WITHIN**2 / 2)
    )
    between = np.stack([own_speeds(ranks, source) for _ in range(draws)])
    return float(PASS_S * (between * within).max(axis=1).mean())


def jitter() -> None:
    """Predict the slowest of eight ranks from two and four, and that of 4,096 from eight."""
    warnings.filterwarnings("ignore", message=".* shared .* cores")
    for kind in ("log-normal", "normal"):
        run = ss.launch(
            ss.Job(model=jittery(kind), data="digits", strategy="ring", world_size=EIGHT, batch=64, steps=152,
                   record=ss.Record(spans_first=152)),
            preflight=False,
        ).wait(300)  # fmt: skip
        times = np.stack([*computing_times(run).values()], axis=1)
        measured_s = float(times.max(axis=1).mean())
        print(f"{kind} times of {EIGHT} ranks, {len(times)} steps; load {os.getloadavg()[0]:.1f}")
        for count in (2, 4, EIGHT):
            guesses = [
                float(ss.jitter(run, ranks=ranks).slowest_s(EIGHT)) / measured_s - 1
                for ranks in combinations(range(EIGHT), count)
            ]
            told = f"mean error {fmean(guesses):+.1%}"
            if len(guesses) > 1:
                told += f", standard deviation {stdev(guesses):.1%} over {len(guesses)} choices"
            print(f"  slowest of {EIGHT}: measured {1e3 * measured_s:.1f} ms; from {count} ranks, {told}")
        found = ss.jitter(run)
        overhead_s = found.mean_s - PASS_S * float(own_speeds(EIGHT, np.random.default_rng(1)).mean())
        known_s, guess_s = injected_slowest_s(kind, FAR) + overhead_s, float(found.slowest_s(FAR))
        print(
            f"  measured jitter: {found.within:.1%} within (injected {WITHIN:.1%}), {found.between:.1%} between ranks "
            f"(injected {BETWEEN:.1%}); overhead {1e3 * overhead_s:.1f} ms\n"
            f"  slowest of {FAR:,}: predicted {1e3 * guess_s:.1f} ms, injected and overhead {1e3 * known_s:.1f} ms, "
            f"error {guess_s / known_s - 1:+.1%}; mean of a rank {1e3 * found.mean_s:.1f} ms",
            flush=True,
        )


def main() -> None:
    """Measure the ways that are named, or all."""
    names = sys.argv[1:] or [*WAYS, "jitter"]
    ways = [name for name in names if name != "jitter"]
    if ways:
        table(ways)
    if not sys.argv[1:]:
        unlike()
    if "jitter" in names:
        jitter()


if __name__ == "__main__":
    main()
