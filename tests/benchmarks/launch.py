"""From `ss.launch` to the end of the first training step on real ranks, and the memory of all processes together.

python tests/benchmarks/launch.py [world_size]     an MLP over a ring; 4 ranks by default
python tests/benchmarks/launch.py layouts          a tiny GPT on 8 ranks: several layouts, interleaved, and by phase

The phases are medians of the last rank's events: its process runs, it is in its group and has built its model, its
first step ends.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss

ROUNDS = 10


def to_first_step(job: ss.Job) -> tuple[float, ss.Run]:
    """Seconds until every rank has finished its first step."""
    started = time.time()
    run = ss.launch(job)
    while len(run.events("step")) < job.world_size:
        if not run.is_alive:
            run.wait()
        time.sleep(0.002)
    first = max(event["t"] for event in run.events("step") if event["step"] == 1)
    return first - started, run


def total_pss(run: ss.Run) -> float:
    """Proportional set size in MB of the launch server, the agent and all ranks, without what ends meanwhile."""
    status = run._dir.read_status()
    assert status is not None
    server = psutil.Process(status.pid).parent()
    assert server is not None
    return sum(map(pss, (server, *server.children(recursive=True)))) / 1e6


def pss(process: psutil.Process) -> int:
    """Bytes; none of a process that has just ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0


def tiny() -> Any:
    """A GPT of two blocks."""
    from shardscope.spec.models import GPTConfig
    from shardscope.training.models import build_model

    return build_model(GPTConfig(layers=2, hidden=16, heads=4, vocab=256, seq=16, ffn=32))


def phases(run: ss.Run, started: float) -> list[float]:
    """Seconds from the launch until the last rank has reached each phase."""
    return [
        max(event["t"] for event in run.events(kind) if event.get("step", 1) == 1) - started
        for kind in ("process", "start", "step")
    ]


def compare_layouts() -> None:
    """Print the median phases of a warm launch for layouts of 8 ranks, one launch of each after another."""
    degrees = [
        {"data": 8}, {"data": 8, "zero": 1}, {"data": 4, "tensor": 2}, {"data": 2, "tensor": 4},
        {"data": 4, "tensor": 2, "zero": 3}, {"pipeline": 2, "data": 2, "tensor": 2},
    ]  # fmt: skip
    jobs = {}
    for each in degrees:
        name = " ".join(f"{axis}={degree}" for axis, degree in each.items())
        try:
            layout = ss.Layout(**each, global_batch=16, micro_batch=1)
            jobs[name] = ss.Job(model=tiny, data="python-source", layout=layout, steps=10**6)
        except ss.SpecError as error:
            print(f"{name}: {error}")
    found: dict[str, list[list[float]]] = {name: [] for name in jobs}
    for _ in range(ROUNDS + 1):
        for name, job in jobs.items():
            started = time.time()
            _, run = to_first_step(job)
            found[name].append(phases(run, started))
            run.stop()
    print(
        f"8 ranks on {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; warm medians of {ROUNDS}"
    )
    for name, rows in found.items():
        process, start, step = (statistics.median(column) for column in zip(*rows[1:], strict=True))
        print(f"{name:28} processes {process:5.2f} s, started {start:5.2f} s, first step {step:5.2f} s")


def main() -> None:
    if sys.argv[1:] == ["layouts"]:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SHARDSCOPE_RUNS"] = folder
            compare_layouts()
            ss.runtime.shut_down()
        return
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=world_size, steps=10**6)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDSCOPE_RUNS"] = folder
        seconds = []
        for _ in range(ROUNDS + 1):
            took, run = to_first_step(job)
            seconds.append(took)
            memory = total_pss(run)
            run.stop()
        ss.runtime.shut_down()
    print(f"launch to first step, {world_size} ranks, {len(os.sched_getaffinity(0))} cores")
    print(f"first ever  {seconds[0]:6.2f} s\nwarm median {statistics.median(seconds[1:]):6.2f} s of {ROUNDS}")
    print(f"server, agent and ranks: {memory:.0f} MB PSS")


if __name__ == "__main__":
    main()
