"""A step that samples its layers, or measures the gradient noise scale, against the same step that does not.

python tests/benchmarks/step_statistics.py [world_size]

The same ranks take all of them in turns. A run samples its layers at every tenth step unless it is told otherwise, so a
tenth of what is printed is what that costs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._ranks import by_record, compare_on_ranks

ROUNDS = 30
WITH_LAYERS = {
    "lamb": {"optimizer": "lamb"},
    "lamb, zero-3": {"optimizer": "lamb", "strategy": "zero-3"},
    "sgd, topk": {"optimizer": "sgd", "compression": "topk"},
    "sgd, int8 with feedback": {"optimizer": "sgd", "compression": ss.Compression("int8", feedback=True)},
}
WITH_NOISE = {"noise scale": {}, "noise scale, int8": {"compression": "int8"}}
QUIET = {"memory_first": 0, "memory_every": None}
LAYERS = {
    "off": ss.Record(layers_every=0, **QUIET),
    "a step that looks": ss.Record(layers_every=1, **QUIET),
}
NOISE = {
    "off": ss.Record(),
    "every step": ss.Record(noise_scale=True),
    "on, other steps": ss.Record(noise_scale=True, noise_every=10**6),
}


def job(**fields: object) -> ss.Job:
    fields = {"strategy": "ring", **fields}
    return ss.Job(model="gpt-nano", data="python-source", batch=64, steps=10**6, **fields)


def main() -> None:
    cases = {
        f"gpt-nano, {name}": by_record(job(**fields), records)
        for some, records in ((WITH_LAYERS, LAYERS), (WITH_NOISE, NOISE))
        for name, fields in some.items()
    }
    compare_on_ranks(cases, rounds=ROUNDS, baseline="off")


if __name__ == "__main__":
    main()
