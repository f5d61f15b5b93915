"""Shards as they are written: complete or not at all, of equal size, and never with the whole data in memory."""

from __future__ import annotations

import os
import stat
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import shardscope as ss
from conformance.shards import numbered, row_bytes
from shardscope.errors import DataError, SpecError


def read(shards: ss.Shards) -> list[np.ndarray]:
    return [np.load(path) for path in sorted(Path(shards.path).iterdir())]


def test_the_rows_come_back_in_order_whatever_the_parts_they_were_given_in(tmp_path):
    x, y = numbered(100)
    cuts = [0, 7, 7, 50, 51, 100]
    parts = ((x[a:b], y[a:b]) for a, b in pairwise(cuts))
    for name, data in (("arrays", (x, y)), ("parts", parts), ("tensors", (torch.tensor(x), torch.tensor(y)))):
        found = read(ss.write_shards(tmp_path / name, data, shard_size=16 * row_bytes()))
        assert [len(rows) for rows in found] == [16] * 6 + [4]
        rows = np.concatenate(found)
        assert np.array_equal(rows["x"], x)
        assert np.array_equal(rows["y"], y)


def test_tokens_are_written_as_one_sequence(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    found = read(ss.write_shards(tmp_path / "t", np.array_split(tokens, 7), shard_size="600 B"))
    assert [len(rows) for rows in found] == [300, 300, 300, 100]
    assert np.array_equal(np.concatenate(found), tokens)


def test_a_generator_is_not_held_in_memory(tmp_path):
    def parts():
        for _ in range(40):
            yield np.zeros((1000, 100), np.float32), np.zeros(1000, np.int64)  # 16 MB in all

    tracemalloc.start()
    ss.write_shards(tmp_path / "big", parts(), shard_size="400 kB")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6e6


def test_a_folder_is_there_only_when_it_is_complete(tmp_path):
    def parts():
        yield numbered(10)
        assert not (tmp_path / "broken").exists()
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        ss.write_shards(tmp_path / "broken", parts(), shard_size=row_bytes())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data has no rows"),
        (3, "data=3 cannot be written; give"),
        (np.zeros(3), r"a part of shape \(3,\) and type float64; give pairs"),
        ((np.zeros((3, 2)), np.zeros(2)), r"x has shape \(3, 2\) .* with one target for each input"),
        ((np.array(["a"]), np.zeros(1)), "give arrays of numbers"),
        ([numbered(2), (np.zeros((2, 3)), np.zeros(2))], "give rows of equal shape and type"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        ss.write_shards(tmp_path / "shards", data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o700), (0o022, 0o755)])
def test_the_folder_is_as_open_as_the_umask_says(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        ss.write_shards(tmp_path / "s", numbered(10))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("hello")
    with pytest.raises(DataError, match="exists and is not empty; give a new folder"):
        ss.write_shards(tmp_path, numbered(2))
    with pytest.raises(SpecError, match="shard_size='0 MB' is not valid"):
        ss.write_shards(tmp_path / "new", numbered(2), shard_size="0 MB")
