"""From the kill of a rank to the next step, on 4 ranks, from a checkpoint on disk and from a copy in memory.

python tests/benchmarks/recovery.py [rounds]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss

RANKS, STEPS, EVERY = 4, 20, 5
PLACES = {"this machine": None, "2 emulated nodes of 2 ranks": ss.Cluster.emulated(nodes=2, per_node=2)}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        for place, cluster in PLACES.items():
            for strategy in ("ring", "zero-3"):
                job = ss.Job(
                    model="mlp", data="digits", strategy=strategy, world_size=RANKS, steps=STEPS, recovery=1,
                    checkpoint=ss.Checkpoint(every=EVERY),
                )  # fmt: skip
                copied = job.replace(checkpoint=ss.Checkpoint(), recovery=ss.Recovery(1, replica_every=1))
                for source, each in {"disk": job, "memory": copied}.items():
                    seconds = [
                        to_next_step(each, cluster, folder, victim=turn % RANKS) for turn in range(rounds)
                    ]
                    print(
                        f"{place}, {strategy}, {source}: {statistics.median(seconds):.2f} s from kill to next step "
                        f"(median of {rounds}; {min(seconds):.2f} to {max(seconds):.2f})"
                    )


def to_next_step(job: ss.Job, cluster: object, folder: str, *, victim: int) -> float:
    """Seconds from the kill until all ranks have finished the first step after it."""
    faults = ss.Faults().kill(victim, step=13)
    run = ss.launch(job, cluster, root=folder, faults=faults, preflight=False).wait(180)  # type: ignore[arg-type]
    log = run.reduced()
    recovered = log.restarts[0].recovered_t
    assert recovered is not None
    return recovered - log.faults[0]["t"]


if __name__ == "__main__":
    main()
