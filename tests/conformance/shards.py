"""Shards for tests: rows that say who they are, and small jobs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardscope as ss
from conformance.runs import small_job

FEATURES = 8


def numbered(count: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose first input is their number, and whose target is its last digit."""
    numbers = np.arange(first, first + count)
    x = np.random.default_rng(first).standard_normal((count, FEATURES)).astype(np.float32)
    x[:, 0] = numbers
    return x, numbers % 10


def row_bytes() -> int:
    """Size of one row in a shard."""
    return 4 * FEATURES + 8


def shards_in(folder: Path, *, shards: int = 10, rows: int = 40, **settings: Any) -> ss.Shards:
    """A folder of shards with `rows` rows each."""
    written = ss.write_shards(folder, numbered(shards * rows), shard_size=rows * row_bytes())
    return written.replace(**settings)


def numbers_of(inputs: torch.Tensor) -> list[int]:
    """Which rows a batch holds."""
    return [round(number) for number in inputs[:, 0].tolist()]


def classifier() -> torch.nn.Module:
    """A model for these rows that first scales down their number."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(FEATURES, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x * torch.tensor([1e-4] + [1.0] * (FEATURES - 1)))

    return Scaled()


def shards_job(data: Any, **changes: Any) -> ss.Job:
    """A job on such shards."""
    fields: dict[str, Any] = {
        "model": classifier,
        "data": data,
        "batch": 24,
        "record": ss.Record(memory_first=0),
    }
    return small_job(**{**fields, **changes})
