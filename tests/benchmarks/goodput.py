"""Goodput of real runs that random failures kill, beside what was predicted before they began. Linux only.

python tests/benchmarks/goodput.py [runs] [folder]

An earlier run measures what steps, checkpoints and restarts take, with kills at fixed steps; the scored runs are not
used for it. Then all predictions are printed: the formula's mean for an endless run, the distribution over simulated
runs of this length, and for each run's own plan of kills. Each rank computes a step in 100 ms, by sleeping, so that
three of them fit on few cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks.emulated_grid import perceptron
from shardscope.measure.goodput import ExpectedGoodput

RANKS, BATCH, STEPS, EVERY = 3, 48, 480, 20
COMPUTE_S, MTBF_S = 0.1, 8.0
KILLED_BEFORE = (35, 51, 77, 99, 104, 128, 146, 165)
"""Steps before which the earlier run's ranks are killed in turn."""
LONGEST_S = 600.0


def job(steps: int) -> ss.Job:
    return ss.Job(
        model=perceptron(64), data="digits", strategy="ring", world_size=RANKS, batch=BATCH, steps=steps,
        checkpoint=EVERY, recovery=ss.Recovery(1000), record=ss.Record(spans_first=0, memory_every=None),
    )  # fmt: skip


def cluster() -> object:
    flops = 3 * ss.predict(job(STEPS)).found.table.flops * BATCH / RANKS / COMPUTE_S
    return ss.Cluster.emulated(nodes=1, per_node=RANKS, flops=flops, memory_bandwidth="1 GB/s")


def plan(seed: int) -> ss.Faults:
    return ss.Faults.random(world_size=RANKS, duration_s=LONGEST_S, mtbf_s=MTBF_S * RANKS, seed=seed)


def measure(root: str, steps: int, faults: ss.Faults) -> ss.Run:
    return ss.launch(job(steps), cluster(), root=root, faults=faults, preflight=False).wait(900)  # type: ignore[call-overload]


def earlier_run(root: str) -> ss.Run:
    faults = ss.Faults()
    for turn, step in enumerate(KILLED_BEFORE):
        faults = faults.kill(turn % RANKS, step=step)
    return measure(root, KILLED_BEFORE[-1] + 2 * EVERY, faults)


def show(costs: ss.Run, found: ExpectedGoodput) -> None:
    each, step_s = found.costs, ss.predict(job(STEPS), cluster()).step_time_s  # type: ignore[arg-type]
    print(
        f"Measured in {costs.id}: step {1e3 * each.step_s:.1f} ms (predicted {1e3 * (step_s or 0):.1f}), between "
        f"steps {1e3 * each.between_s:.1f} ms, checkpoint {1e3 * each.save_s:.0f} ms every {each.every} steps, "
        f"restart {each.restart_s:.2f} s (mean of {each.num_restarts}), setup {each.setup_s:.2f} s, ending "
        f"{each.ending_s:.2f} s"
    )
    low, high = found.interval
    assert found.endless is not None
    print(
        f"A failure every {MTBF_S:g} s, {STEPS} steps: predicted goodput {found.mean:.1%} of a run (90 % of runs: "
        f"{low:.1%} to {high:.1%}), {found.total:.1%} of all runs together, {float(found.endless.goodput):.1%} of an "
        "endless run",
        flush=True,
    )


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as root:
        earlier = earlier_run(root)
        expected = ss.goodput(earlier, mtbf_s=MTBF_S, steps=STEPS)
        show(earlier, expected)
        planned = [ss.goodput(earlier, faults=plan(seed), steps=STEPS).mean for seed in range(count)]
        told = ", ".join(f"{each:.1%}" for each in planned)
        print(f"Predicted for the kills of each run: {told}; mean {fmean(planned):.1%}", flush=True)
        print("run  kills  measured  by its kills   error  restart  load", flush=True)
        measured, useful_s, wall_s, inside = [], 0.0, 0.0, 0
        for seed in range(count):
            run = measure(root, STEPS, plan(seed))
            summary = run.summary()
            assert summary.goodput is not None
            assert summary.wall_s is not None
            measured.append(summary.goodput)
            useful_s, wall_s = useful_s + summary.goodput * summary.wall_s, wall_s + summary.wall_s
            inside += expected.interval.low <= summary.goodput <= expected.interval.high
            took = ss.goodput(run, mtbf_s=MTBF_S).costs.restart_s if summary.restarts else float("nan")
            print(
                f"{seed:3} {summary.restarts:6} {summary.goodput:9.1%} {planned[seed]:13.1%} "
                f"{planned[seed] / summary.goodput - 1:+7.1%} {took:6.2f} s {os.getloadavg()[0]:5.1f}",
                flush=True,
            )
        together = useful_s / wall_s
        print(
            f"Mean of {count} runs: measured {fmean(measured):.1%} (standard deviation {stdev(measured):.1%}), "
            f"predicted {expected.mean:.1%} ({expected.mean / fmean(measured) - 1:+.1%}), from their kills "
            f"{fmean(planned):.1%} ({fmean(planned) / fmean(measured) - 1:+.1%})\n"
            f"All runs together: measured {together:.1%}, predicted {expected.total:.1%} "
            f"({expected.total / together - 1:+.1%}); {inside} of {count} within the 90 % interval\n"
            f"Largest error of a run, from its kills: "
            f"{max(abs(p / m - 1) for p, m in zip(planned, measured, strict=True)):.1%}"
        )


if __name__ == "__main__":
    main()
