"""A step that tells of its layers against the same step that does not, same ranks, interleaved.

python tests/benchmarks/layers.py [world_size]

A run looks at every tenth step unless it is told otherwise, so a tenth of what is printed is what it costs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._ranks import by_record, compare_on_ranks

ROUNDS = 30
CASES = {
    "lamb": {"optimizer": "lamb"},
    "lamb, zero-3": {"optimizer": "lamb", "strategy": "zero-3"},
    "sgd, topk": {"optimizer": "sgd", "compression": "topk"},
    "sgd, int8 with feedback": {"optimizer": "sgd", "compression": ss.Compression("int8", feedback=True)},
}
QUIET = {"memory_first": 0, "memory_every": None}
RECORDS = {
    "off": ss.Record(layers_every=0, **QUIET),
    "a step that looks": ss.Record(layers_every=1, **QUIET),
}


def job(**fields: object) -> ss.Job:
    fields = {"strategy": "ring", **fields}
    return ss.Job(model="gpt-nano", data="python-source", batch=64, steps=10**6, **fields)


def main() -> None:
    cases = {f"gpt-nano, {name}": by_record(job(**fields), RECORDS) for name, fields in CASES.items()}
    compare_on_ranks(cases, rounds=ROUNDS, baseline="off")


if __name__ == "__main__":
    main()
