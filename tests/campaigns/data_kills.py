"""Runs on shards and streams, killed at a random moment and resumed on another number of ranks: every sample once.

    PYTHONPATH=tests python tests/campaigns/data_kills.py --first 0 --count 10

Each case draws the kind of data, the world sizes, the victim and the step after which it is killed. The rows that the
weights have been through, as the model saw them, must be those of one epoch, each exactly once.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from _campaign import Outcome, run
from torch.utils.data import IterableDataset

import shardscope as ss
from conformance.rows_read import killed_and_resumed, recording
from conformance.shards import FEATURES, shards_in, shards_job

CASES = 40
SHARDS, ROWS, BATCH = 10, 48, 12
KINDS = ("shards", "cached", "slow", "stream")


class Stream(IterableDataset):
    """As many items as the shards have training rows."""

    def __iter__(self) -> Any:
        for number in range((SHARDS - 1) * ROWS):
            yield torch.tensor([float(number)] + [0.5] * (FEATURES - 1)), number % 10


def stream() -> Any:
    """The stream, and other rows to test on."""
    return Stream(), (torch.zeros(4, FEATURES), torch.zeros(4, dtype=torch.int64))


def case(number: int, source: random.Random) -> Outcome:
    """One kill."""
    kind = KINDS[number % len(KINDS)]
    before, world_size = source.sample((2, 3, 4), 2)
    steps = (SHARDS - 1) * ROWS // BATCH
    after = source.randrange(3, steps - 6)
    details = {"kind": kind, "before": before, "then": world_size, "after": after}
    with tempfile.TemporaryDirectory(prefix="shardscope-data-") as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        data: Any = stream
        if kind != "stream":
            settings: dict[str, Any] = {"window": source.choice((1, 3, 10))}
            if kind != "shards":
                settings |= {"cache": "10 MB", "cache_folder": str(folder / "cache")}
            if kind == "slow":
                settings |= {"slow": ss.Link(bandwidth="100 kB/s", latency="5 ms")}
            data = shards_in(folder / "shards", shards=SHARDS, rows=ROWS, **settings)
        job = shards_job(
            data, model=recording(folder / "rows", 0.01), world_size=before, batch=BATCH, steps=steps,
            checkpoint=ss.Checkpoint(every=source.choice((1, 2, 3))), seed=source.randrange(1000),
        )  # fmt: skip
        rows = killed_and_resumed(
            job, folder / "rows", after=after, victim=source.randrange(before), world_size=world_size,
            root=folder / "runs",
        )  # fmt: skip
    is_exact = sorted(rows) == list(range((SHARDS - 1) * ROWS))
    return Outcome("every sample once" if is_exact else "not exact", violation=not is_exact, details=details)


if __name__ == "__main__":
    run(case, cases=CASES, description=__doc__)
