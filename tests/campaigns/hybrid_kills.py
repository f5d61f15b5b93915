"""A hundred kills under layouts of several axes: no process is left, and no checkpoint is lost.

    PYTHONPATH=tests python tests/campaigns/hybrid_kills.py --first 0 --count 50

Every other case kills a rank, agent, launch server or kernel at a random call within the transport, as
`transport_kills.py` does, on four ranks of two axes. The others kill inside a checkpoint, as `checkpoint_kills.py`
does, under a random layout, and go on from what is left under another one.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkpoint_kills
import transport_kills
from _campaign import Outcome, run

import shardscope as ss
from oracle import hybrid

KILLS = 100


def case(number: int, source: random.Random) -> Outcome:
    """One kill."""
    return in_checkpoint(source) if number % 2 else transport_kills.case(number, source, is_hybrid=True)


def in_checkpoint(source: random.Random) -> Outcome:
    """Kill a run inside a checkpoint, and go on under another layout."""
    checkpoint = ss.Checkpoint(
        every=2, keep=3, asynchronous=source.random() < 0.5, incremental=source.random() < 0.5
    )
    settings = {"optimizer": "adamw", "steps": 100_000, "checkpoint": checkpoint}
    before, after = hybrid.draw_trainable(source, (4,), settings)
    victim = source.choice(["rank 0", "rank 3", "agent", "all"])
    root = Path(tempfile.mkdtemp(prefix="shardscope-hybrid-kills-"))
    try:
        jobs = [hybrid.job_of(quick(drawn), **settings) for drawn in (before, after)]
        outcome = checkpoint_kills._killed(jobs[0], root, victim, source, jobs[1])
    finally:
        shutil.rmtree(root, ignore_errors=True)
    pair = f"{hybrid.told(before)} | {hybrid.told(after)}"
    return outcome._replace(details={**outcome.details, "pair": pair})


def quick(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The same layout with steps that take little time: a small batch, in as few micro-batches as it can have."""
    layout = {name: value for name, value in drawn["layout"].items() if name != "micro_batch"}
    return {**drawn, "layout": {**layout, "global_batch": 16}}


if __name__ == "__main__":
    transport_kills._move()
    run(case, cases=KILLS, description=__doc__)
