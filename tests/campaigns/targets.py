"""Jobs with targets that do not count, held against one process of plain torch on the whole batch at once.

    python tests/campaigns/targets.py                       all of it
    python tests/campaigns/targets.py --first 0 --count 50  a slice

Losses (named, of torch, of Hugging Face models, own with a count, sums) × strategies × 1 to 4 ranks × micro-batches, of
other data in each case. In fp64, losses, parameters and the evaluation of the test rows must be equal within 1e-9.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import _campaign
import torch

import shardscope as ss
from conformance import counted
from conformance.alone import trainer_in
from conformance.ranks import RankPool
from shardscope.errors import DataError
from shardscope.methods.strategies.single import Single

STRATEGIES: dict[str, list[Any]] = {
    "single": [Single()],
    "all-reduce": [ss.AllReduce(), ss.AllReduce(bucket_mb=0.0005)],
    "ring": [ss.Ring(), ss.Ring(bucket_mb=0.0005, slice_mb=0.0001)],
    "tree": [ss.Tree()],
    "hierarchical": [ss.Hierarchical()],
    "zero-1": [ss.Zero1(), ss.Zero1(collectives="backend")],
    "zero-2": [ss.Zero2(), ss.Zero2(collectives="backend")],
    "zero-3": [ss.Zero3(), ss.Zero3(collectives="backend")],
    "parameter-server": [ss.ParameterServer(), ss.ParameterServer(servers=1, dedicated=True)],
    "pipeline": [
        ss.Pipeline(schedule=name) for name in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
    ],
}
PAIRS = [
    (name, kind, ranks)
    for name, kind, ranks in product(counted.CASES, STRATEGIES, (1, 2, 3, 4))
    if (kind == "single") is (ranks == 1) and (kind != "pipeline" or counted.CASES[name].can_be_cut)
]
CASES = 2 * len(PAIRS)
"""Each loss meets each strategy at each number of ranks twice; all else is drawn."""


@cache
def pool(ranks: int) -> RankPool:
    """Ranks that stay up."""
    return RankPool(ranks)


def case(number: int, source: random.Random) -> _campaign.Outcome:
    """Draw one job and hold it against plain torch."""
    torch.set_num_threads(1)
    name, kind, ranks = random.Random(0).sample(PAIRS, len(PAIRS))[number % len(PAIRS)]
    counted.SEED = source.randrange(1000)
    ours, strategy = counted.CASES[name], source.choice(STRATEGIES[kind])
    workers = strategy.num_data_ranks(ranks)
    parts = ranks * 2 if kind == "pipeline" else source.choice([1, 2, 4, 24 // workers])
    micro_batch = max(1, counted.BATCH // workers // parts)
    job = ours.job(strategy, ranks, micro_batch)
    told = {
        "job": f"{name} {strategy.label} {strategy.changed} W={ranks} micro={micro_batch} seed={counted.SEED}"
    }
    expected = counted.uncut(ours)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = _results(job, ranks, Path(folder))
        except (AssertionError, DataError) as error:  # of a batch in which no target counts
            is_empty = any(map(math.isnan, expected.losses)) and "no target of the global batch" in str(error)
            return _campaign.Outcome(
                "refused" if is_empty else "raised", not is_empty, {**told, "error": str(error)}
            )
    apart = counted.apart(results, expected)
    is_wrong = max(apart.values()) > ours.bound
    return _campaign.Outcome("wrong" if is_wrong else "equal", is_wrong, {**told, **apart})


def _results(job: ss.Job, ranks: int, folder: Path) -> list[Any]:
    if ranks == 1:
        return [counted.trained_by(trainer_in(folder, **{**dict(job), "checkpoint": ss.Checkpoint()}))]
    seed = counted.SEED
    running = pool(ranks)
    if running.closed:
        pool.cache_clear()
        running = pool(ranks)

    def on_rank(context: Any) -> Any:
        counted.SEED = seed
        return counted.trained(job, context)

    return running.run(on_rank, folder)


if __name__ == "__main__":
    _campaign.run(case, cases=CASES, description=__doc__)
