"""Whole runs over shared memory against TCP: trials of a study per minute, and the demo's runs.

    python tests/benchmarks/transports_runs.py [tuning|demo] [rounds]

Both transports take turns, round by round, with the same jobs: the first round warms both up and is not counted. A
trial and a run are timed as a user waits for them, from launch to the summary. Beside them is the processor time of the
launch server and all ranks, which depends less on what else the machine does.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

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


class Taken(NamedTuple):
    """Seconds, and processor seconds of the processes that this process has started."""

    wall: float
    cpu: float


def cpu_s() -> float:
    """Processor seconds of the launch server, its agents and all ranks so far, those that have ended included."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def taken(call: Callable[[], object]) -> Taken:
    """Time a call."""
    cpu, begun = cpu_s(), time.perf_counter()
    call()
    return Taken(time.perf_counter() - begun, cpu_s() - cpu)


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
        rates = {name: 60 * TRIALS / statistics.median(t.wall for t in turns[name]) for name in TRANSPORTS}
        print(
            f"{title}: trials per minute " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
        )
        print(
            f"  shm over tcp: {1 / ratio(turns, 'wall'):.2f} x the trials (bar 1.5); cpu {ratio(turns, 'cpu'):.2f} x"
        )


def demo(rounds: int) -> None:
    """Print the time of the demo's runs over both transports; jobs on one process have no transport."""
    sums: dict[str, list[Taken]] = {name: [Taken(0, 0)] * rounds for name in TRANSPORTS}
    for job in jobs():
        turns = by_turns(rounds, lambda transport, _, job=job: launched(job.replace(transport=transport)))
        print(
            f"{job.name:<28} tcp {medians(turns['tcp'])}  shm {medians(turns['shm'])}  {ratio(turns, 'wall'):.2f} x"
        )
        for name in TRANSPORTS:
            sums[name] = [
                Taken(a.wall + b.wall, a.cpu + b.cpu) for a, b in zip(sums[name], turns[name], strict=True)
            ]
    print(
        f"all runs: tcp {medians(sums['tcp'])}, shm {medians(sums['shm'])}: {ratio(sums, 'wall'):.2f} x (bar 0.6), "
        f"cpu {ratio(sums, 'cpu'):.2f} x"
    )


def launched(job: ss.Job) -> None:
    """Run a job to its end."""
    with tempfile.TemporaryDirectory() as root:
        ss.launch(job, root=root).wait(300)


def by_turns(rounds: int, call: Callable[[str, int], object]) -> dict[str, list[Taken]]:
    """Time a call with each transport, in changing order; the first round warms up."""
    turns: dict[str, list[Taken]] = {name: [] for name in TRANSPORTS}
    for number in range(rounds + 1):
        for name in TRANSPORTS[:: 1 if number % 2 else -1]:
            each = taken(lambda name=name, number=number: call(name, number))
            if number:
                turns[name].append(each)
    return turns


def ratio(turns: dict[str, list[Taken]], kind: str) -> float:
    """Median of the rounds' ratios, shared memory over TCP."""
    pairs = zip(turns["shm"], turns["tcp"], strict=True)
    return statistics.median(getattr(one, kind) / getattr(other, kind) for one, other in pairs)


def medians(takings: list[Taken]) -> str:
    """Median seconds and processor seconds."""
    wall, cpu = (statistics.median(column) for column in zip(*takings, strict=True))
    return f"{wall:6.2f} s (cpu {cpu:6.2f} s)"


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
