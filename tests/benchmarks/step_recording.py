"""The cost of recording one step message by message: the same jobs with and without it, interleaved.

    python tests/benchmarks/step_recording.py [rounds] [strategy ...]

The recorded step logs every message and measures memory by type over time, as by default; the other runs do neither.
The cost is the extra time of that one step, as a share of all steps of a run of 100 steps. The fastest and the slowest
extra of all rounds show how far the machine's noise reaches.
"""

from __future__ import annotations

import statistics
import sys
import tempfile

import shardscope as ss

STRATEGIES = ("ring", "tree", "parameter-server", "pipeline", "zero-3")
STEPS, RECORDED = 100, 3


def times(strategy: str, first: int, root: str) -> list[float]:
    """Step times of one run on its slowest rank, in seconds."""
    job = ss.Job(
        model="gpt-nano", data="python-source", strategy=strategy, world_size=4, batch=16, steps=STEPS,
        record=ss.Record(messages_first=first, memory_first=first, memory_every=None),
    )  # fmt: skip
    run = ss.launch(job, root=root).wait(300)
    by_step: dict[int, float] = {}
    for event in run.events("step"):
        by_step[event["step"]] = max(by_step.get(event["step"], 0.0), event["step_time_s"])
    return [by_step[step] for step in sorted(by_step)]


def main(rounds: int, strategies: list[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        for strategy in strategies:
            found: dict[int, list[list[float]]] = {0: [], RECORDED: []}
            for number in range(rounds):
                for first in (0, RECORDED) if number % 2 else (RECORDED, 0):
                    found[first].append(times(strategy, first, root))
            whole = statistics.median(sum(run) for run in found[0])
            pairs = zip(found[RECORDED], found[0], strict=True)
            extras = sorted((new[RECORDED - 1] - old[RECORDED - 1]) / whole for new, old in pairs)
            print(
                f"{strategy:18} {statistics.median(extras):+.2%} of {STEPS} steps ({whole:.2f} s); "
                f"rounds from {extras[0]:+.2%} to {extras[-1]:+.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2:] or list(STRATEGIES))
