"""A run whose number of ranks changes at random ends where the same job ends on a fixed number of ranks.

Strategies, optimizers, the numbers of ranks and their order are drawn by seed, and whether the state passes through
memory or the disk; each case trains a job once with three resizes and once without, and compares every loss and all
parameters. Strategies whose order of updates is the clock's
(`OWN_ORDER`) have no fixed end: of them, only that no step is lost or repeated, and that the loss falls.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from _campaign import Outcome, run

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from conformance.elastic import STEPS, apart, elastic_job, fixed, resized

EXACT = (
    "ring", "ring:2", "tree", "all-reduce", "hierarchical", "zero-1", "zero-2", "zero-3", "zero-3:backend",
    ss.Zero2(shards="memory"),  # even here, but cut as uneven ones are
    "parameter-server", "pipeline:gpipe", "pipeline:1f1b", "pipeline:interleaved", "pipeline:zero-bubble",
)  # fmt: skip
OWN_ORDER = ("parameter-server:async", "parameter-server:ssp", "gossip")
OPTIMIZERS = (
    {"name": "sgd", "lr": 0.05, "momentum": 0.9}, {"name": "nesterov", "lr": 0.03},
    {"name": "adamw", "lr": 3e-3}, {"name": "lamb", "lr": 5e-3}, {"name": "lars", "lr": 1.0},
)  # fmt: skip
BOUND = 1e-5
CASES = (len(EXACT) + len(OWN_ORDER)) * len(OPTIMIZERS)


def case(number: int, source: random.Random) -> Outcome:
    """One strategy with one optimizer, on three other numbers of ranks one after another."""
    strategies = (*EXACT, *OWN_ORDER)
    strategy = strategies[number % len(strategies)]
    sizes = source.choice([(2, 4, 3, 2), (4, 2, 3, 4), (3, 4, 2, 3), (2, 3, 2, 4)])
    fields: dict[str, Any] = {
        "strategy": strategy, "optimizer": ss.Optimizer(**OPTIMIZERS[number // len(strategies)]),
        "world_size": sizes[0], "seed": source.randrange(1000), "clip_norm": source.choice([None, 1.0]),
        "batch": ss.Batch(48, micro_batch=source.choice([None, 4])), "eval_every": source.choice([None, 5]),
        "lr_schedule": source.choice(["constant", "cosine"]),
        "recovery": source.choice([None, ss.Recovery(1, replica_every=7)]),
    }  # fmt: skip
    details = {"sizes": sizes, **{name: str(value) for name, value in fields.items()}}
    try:
        job = elastic_job(**fields)
    except ss.SpecError as error:
        return Outcome("refused as a job", details={**details, "error": str(error)})
    root = Path(tempfile.mkdtemp(prefix="shardscope-elastic-"))
    os.environ["SHARDSCOPE_RUNS"] = str(root)
    try:
        found = resized(job, *sizes[1:])
        log = found.reduced()
        losses = log.steps.column("loss")
        details["pauses"] = [round(each.pause_s, 3) for each in log.resizes]
        details["sources"] = [each.source for each in log.resizes]
        if log.restarts:  # recovery is there for its copies, but no rank should need it
            causes = [each.cause for each in log.restarts]
            return Outcome("ranks failed", violation=True, details={**details, "causes": causes})
        is_whole = list(log.steps.column("number")) == list(range(1, STEPS + 1))
        samples = sum(log.steps.column("samples"))
        if not is_whole or (job.strategy.num_data_ranks(2) == 2 and samples != 48 * STEPS):
            return Outcome("a step was lost or repeated", violation=True, details=details)
        if strategy in OWN_ORDER:
            falls = sum(losses[-3:]) < sum(losses[:3])
            return Outcome("falls" if falls else "does not fall", violation=not falls, details=details)
        far = apart(found, fixed(job.replace(recovery=None)))
    finally:
        for each in ss.runs(root, all=True):
            each.stop(grace_s=0.0)
        shutil.rmtree(root, ignore_errors=True)
    is_far = max(far) > BOUND
    return Outcome("differs" if is_far else "equal", violation=is_far, details={**details, "far": far})


if __name__ == "__main__":
    run(case, cases=CASES, description=__doc__)
