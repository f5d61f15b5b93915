"""A step that tells of its layers against the same step that does not, same ranks, interleaved.

python tests/benchmarks/layers.py [world_size]

A run looks at every tenth step unless it is told otherwise, so a tenth of what is printed is what it costs.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._report import compare
from benchmarks.step_overhead import by_toolkit
from conformance.ranks import RankPool
from shardscope.training.context import RankContext

ROUNDS = 30
CASES = {
    "lamb": {"optimizer": "lamb"},
    "lamb, zero-3": {"optimizer": "lamb", "strategy": "zero-3"},
    "sgd, topk": {"optimizer": "sgd", "compression": "topk"},
    "sgd, int8 with feedback": {"optimizer": "sgd", "compression": ss.Compression("int8", feedback=True)},
}


def measure(context: RankContext, case: str) -> str:
    fields = {"strategy": "ring", "world_size": context.world_size, **CASES[case]}
    job = ss.Job(model="gpt-nano", data="python-source", batch=64, steps=10**6, **fields)
    quiet = {"memory_first": 0, "memory_every": None}
    records = {
        "off": ss.Record(layers_every=0, **quiet),
        "a step that looks": ss.Record(layers_every=1, **quiet),
    }
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        compare(
            {name: by_toolkit(context, job.replace(record=record)) for name, record in records.items()},
            rounds=ROUNDS, baseline="off",
        )  # fmt: skip
    return table.getvalue()


def main() -> None:
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    pool = RankPool(world_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for case in CASES:
                tables = pool.run(lambda context, name=case: measure(context, name), Path(folder))
                print(f"\ngpt-nano, {case}, {world_size} ranks\n{tables[0]}", end="", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    from benchmarks.layers import main as run  # the ranks import this module by its name

    run()
