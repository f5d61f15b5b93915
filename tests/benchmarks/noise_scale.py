"""A step that measures the gradient noise scale against the same step that does not, same ranks, interleaved.

python tests/benchmarks/noise_scale.py [world_size]
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

ROUNDS = 15
COMPRESSIONS = ("none", "int8")


def measure(context: RankContext, compression: str) -> str:
    job = ss.Job(
        model="gpt-nano", data="python-source", batch=64, strategy="ring", world_size=context.world_size,
        steps=10**6, compression=compression,
    )  # fmt: skip
    records = {
        "off": ss.Record(),
        "every step": ss.Record(noise_scale=True),
        "on, other steps": ss.Record(noise_scale=True, noise_every=10**6),
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
            for compression in COMPRESSIONS:
                tables = pool.run(lambda context, name=compression: measure(context, name), Path(folder))
                print(f"\ngpt-nano, ring, {compression}, {world_size} ranks\n{tables[0]}", end="", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    from benchmarks.noise_scale import main as run  # the ranks import this module by its name

    run()
