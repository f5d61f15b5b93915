"""A run killed in mid-epoch goes on with another number of ranks, and the epoch still has every sample once."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset

import shardscope as ss
from conformance.rows_read import killed_and_resumed, recording
from conformance.shards import FEATURES, shards_in, shards_job

ROWS = 360


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(ROWS):
            yield torch.tensor([float(number)] + [0.5] * (FEATURES - 1)), number % 10


def stream():
    return Stream(), (torch.zeros(4, FEATURES), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("source", "before", "after"), [("shards", 3, 2), ("cached shards", 2, 4), ("stream", 4, 3)]
)
def test_every_sample_once_though_killed_and_resumed_on_another_world_size(tmp_path, source, before, after):
    if source == "stream":
        data = stream
    else:
        cache = (
            {"cache": "1 MB", "cache_folder": str(tmp_path / "cache")} if source == "cached shards" else {}
        )
        data = shards_in(tmp_path / "shards", shards=10, rows=40, window=3, **cache)
    (tmp_path / "rows").mkdir()
    job = shards_job(
        data, model=recording(tmp_path / "rows", 0.01), world_size=before, batch=12, steps=30,
        checkpoint=ss.Checkpoint(every=4), seed=7,
    )  # fmt: skip
    rows = killed_and_resumed(job, tmp_path / "rows", after=14, victim=before - 1, world_size=after)
    assert len(rows) == ROWS
    if source == "stream":
        assert rows == list(range(ROWS))
    else:
        held_out = {*range(9 * 40, 10 * 40)}
        assert sorted(rows) == sorted({*range(400)} - held_out)
