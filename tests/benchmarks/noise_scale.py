"""A step that measures the gradient noise scale against the same step that does not, same ranks, interleaved.

python tests/benchmarks/noise_scale.py [world_size]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._ranks import by_record, compare_on_ranks

ROUNDS = 15
COMPRESSIONS = ("none", "int8")
RECORDS = {
    "off": ss.Record(),
    "every step": ss.Record(noise_scale=True),
    "on, other steps": ss.Record(noise_scale=True, noise_every=10**6),
}


def job(compression: str) -> ss.Job:
    return ss.Job(
        model="gpt-nano",
        data="python-source",
        batch=64,
        strategy="ring",
        steps=10**6,
        compression=compression,
    )


def main() -> None:
    cases = {f"gpt-nano, ring, {name}": by_record(job(name), RECORDS) for name in COMPRESSIONS}
    compare_on_ranks(cases, rounds=ROUNDS, baseline="off")


if __name__ == "__main__":
    main()
