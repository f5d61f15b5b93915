"""Whole runs over shared memory against TCP: trials of a study per minute, and the demo's runs.

    python tests/benchmarks/transports_runs.py [tuning|demo] [rounds]

Both transports take turns, round by round, with the same jobs: the first round warms both up and is not counted. A
trial and a run are timed as a user waits for them, from launch to the summary.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from shardscope_widgets.demo import jobs

TRANSPORTS = ("tcp", "shm")
TRIALS = 6
SPACE = {"optimizer.lr": (1e-3, 1e-1, "log"), "warmup": (0.0, 0.3)}
STUDIES = {
    f"{ranks} ranks, {steps} steps": ss.Job(
        model="mlp", data="digits", strategy="ring", world_size=ranks, steps=steps, eval_every=steps
    )
    for ranks, steps in ((2, 20), (2, 100), (4, 100))
}


def seconds(call: Callable[[], object]) -> float:
    """Time a call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def study(job: ss.Job, seed: int) -> None:
    """Run a study of `TRIALS` trials."""
    with tempfile.TemporaryDirectory() as root:
        ss.tune(
            job, SPACE, trials=TRIALS, objectives=["loss"], sampler="random", seed=seed, name="study",
            baselines=False, root=root,
        )  # fmt: skip


def tuning(rounds: int) -> None:
    """Print the trials per minute over both transports."""
    for title, job in STUDIES.items():
        turns = by_turns(
            rounds, lambda transport, number, job=job: study(job.replace(transport=transport), number)
        )
        rates = {name: 60 * TRIALS / statistics.median(turns[name]) for name in TRANSPORTS}
        print(
            f"{title}: trials per minute " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
        )
        print(f"  shm over tcp: {1 / ratio(turns):.2f} x the trials (bar 1.5)")


def demo(rounds: int) -> None:
    """Print the time of the demo's runs over both transports; jobs on one process have no transport."""
    sums: dict[str, list[float]] = {name: [0.0] * rounds for name in TRANSPORTS}
    for job in jobs():
        turns = by_turns(rounds, lambda transport, _, job=job: launched(job.replace(transport=transport)))
        print(f"{job.name:<28} {medians(turns)}")
        for name in TRANSPORTS:
            sums[name] = [a + b for a, b in zip(sums[name], turns[name], strict=True)]
    print(f"{'all runs (bar 0.6)':<28} {medians(sums)}")


def launched(job: ss.Job) -> None:
    """Run a job to its end."""
    with tempfile.TemporaryDirectory() as root:
        ss.launch(job, root=root).wait(300)


def by_turns(rounds: int, call: Callable[[str, int], object]) -> dict[str, list[float]]:
    """Seconds of a call with each transport, in changing order; the first round warms up."""
    turns: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    for number in range(rounds + 1):
        for name in TRANSPORTS[:: 1 if number % 2 else -1]:
            took = seconds(lambda name=name, number=number: call(name, number))
            if number:
                turns[name].append(took)
    return turns


def ratio(turns: dict[str, list[float]]) -> float:
    """Median of the rounds' ratios, shared memory over TCP."""
    return statistics.median(one / other for one, other in zip(turns["shm"], turns["tcp"], strict=True))


def medians(turns: dict[str, list[float]]) -> str:
    """Median seconds over both transports, and their ratio."""
    each = "  ".join(f"{name} {statistics.median(turns[name]):6.2f} s" for name in TRANSPORTS)
    return f"{each}  {ratio(turns):.2f} x"


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)
    parts = {"tuning": tuning, "demo": demo}
    asked = [name for name in sys.argv[1:] if name in parts] or list(parts)
    rounds = next((int(text) for text in sys.argv[1:] if text.isdigit()), 3)
    for name in asked:
        print(
            f"{name}: {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, {rounds} rounds",
            flush=True,
        )
        parts[name](rounds)
    ss.runtime.shut_down()


if __name__ == "__main__":
    main()
