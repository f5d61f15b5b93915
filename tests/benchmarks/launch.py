"""From `ss.launch` to the end of the first training step on 4 real ranks, and the memory of all processes together.

python tests/benchmarks/launch.py [world_size]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

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


def main() -> None:
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
