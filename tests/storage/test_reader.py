"""Shards opened while training: ahead of their use, counted, and as slowly as the emulated source says."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

import shardscope as ss
from conformance.shards import numbered, row_bytes, shards_in
from shardscope.errors import DataError
from shardscope.training.data import GlobalSampler, Loader, load_data

ROWS = 40
SHARD = ROWS * row_bytes()


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardscope")}


def epochs_of(spec, *, epochs=2, batch=18, rank=0, world_size=1):
    """Seconds and counts of each epoch of a loader that does nothing but read."""
    source, before = load_data(spec).train, threads()
    sampler = GlobalSampler.of(source, batch, seed=0)
    seconds, counts = [], {}
    with Loader(source, sampler, rank=rank, world_size=world_size) as loader:
        for epoch in range(epochs):
            started = time.perf_counter()
            for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch):
                loader.batch(step)
                fields = loader.fields(step)
                assert fields["epoch"] == epoch
                for number, *row in fields.get("shards", ()):
                    counts[number] = [a + b for a, b in zip(counts.get(number, (0, 0, 0)), row, strict=True)]
            seconds.append(time.perf_counter() - started)
    assert threads() <= before
    return seconds, counts


def test_the_first_epoch_fetches_each_shard_and_the_next_ones_none(tmp_path):
    spec = shards_in(tmp_path / "s", cache="1 MB", cache_folder=str(tmp_path / "c"), window=2)
    _, counts = epochs_of(spec)
    size = (tmp_path / "s/shard-000000.npy").stat().st_size
    assert counts[0] == [9, 0, 9 * size], "one of ten shards is held out"
    assert counts[1] == [9, 9, 0]


def test_a_cache_of_another_run_is_used(tmp_path):
    spec = shards_in(tmp_path / "s", cache="1 MB", cache_folder=str(tmp_path / "c"), window=2)
    epochs_of(spec, epochs=1)
    assert epochs_of(spec, epochs=1)[1][0] == [9, 9, 0]


def test_shards_that_have_changed_are_fetched_again(tmp_path):
    spec = shards_in(tmp_path / "s", cache="1 MB", cache_folder=str(tmp_path / "c"), window=2)
    epochs_of(spec, epochs=1)
    other = ss.write_shards(tmp_path / "other", numbered(400, first=1000), shard_size=SHARD)
    (tmp_path / "s/shard-000003.npy").write_bytes((tmp_path / "other/shard-000003.npy").read_bytes())
    assert other.window == 8
    assert epochs_of(spec, epochs=1)[1][0][:2] == [9, 8]


def test_a_slow_source_takes_the_time_that_it_states_and_the_cache_does_not(tmp_path):
    slow = ss.Link(bandwidth=SHARD / 0.05, latency="5 ms")
    spec = shards_in(tmp_path / "s", slow=slow, window=2)
    (first, second), counts = epochs_of(spec)
    assert 0.4 < first < 1.5, "9 shards of 50 ms"
    assert 0.4 < second < 1.5, "every epoch anew"
    assert counts[0][2] == pytest.approx(9 * SHARD, rel=0.3)
    (first, second), counts = epochs_of(spec.replace(cache="1 MB", cache_folder=str(tmp_path / "c")))
    assert 0.4 < first < 1.5
    assert second < first / 5
    assert counts[1][:2] == [9, 9]


def test_a_cache_that_is_too_small_for_the_data_gives_part_of_the_hits(tmp_path):
    """A rank keeps six shards open, and the cache one more: some of nine are fetched anew in each epoch."""
    size = shards_in(tmp_path / "s") and (tmp_path / "s/shard-000000.npy").stat().st_size
    spec = ss.Shards(str(tmp_path / "s"), cache=1.5 * size, cache_folder=str(tmp_path / "c"), window=1)
    _, counts = epochs_of(spec, epochs=4)
    hits = [counts[epoch][1] for epoch in (1, 2, 3)]
    assert 0 < sum(hits) < 27
    kept = [path.stat().st_size for path in (tmp_path / "c").rglob("*.npy")]
    assert sum(kept) <= 1.5 * size


def test_a_cache_smaller_than_a_window_is_refused(tmp_path):
    spec = shards_in(tmp_path / "s", cache=3 * SHARD, cache_folder=str(tmp_path / "c"), window=4)
    with pytest.raises(
        DataError,
        match="does not hold the 4 shards that are shuffled together; use at least .*, or a smaller window",
    ):
        load_data(spec)


def test_a_window_is_as_large_as_its_unpacked_shards(tmp_path):
    """Zeros that Parquet packs into a fraction of their size."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number in range(4):
        x = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(100 * 100)), 100)
        parquet.write_table(pa.table({"x": x, "y": np.arange(100)}), tmp_path / f"{number}.parquet")
    spec = ss.Shards(str(tmp_path), window=2, cache="100 kB", cache_folder=str(tmp_path / "c"))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.parquet")) < 20_000
    with pytest.raises(DataError, match="does not hold the 2 shards .*; use at least 162 kB"):
        load_data(spec)
    load_data(spec.replace(cache="180 kB"))


def test_a_cache_folder_that_others_can_write_to_is_refused(tmp_path):
    """The folder itself, and not only the one in it that Shardscope creates."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    spec = shards_in(tmp_path / "s", cache="1 MB", cache_folder=str(folder), window=2)
    with pytest.raises(
        DataError, match="open' can be written by other users; set cache_folder to a directory"
    ):
        load_data(spec)
    assert list(folder.iterdir()) == []
    before = os.umask(0o002)
    try:
        load_data(spec.replace(cache_folder=str(tmp_path / "new/cache")))
        load_data(spec.replace(cache_folder=str(tmp_path / "new/cache")))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_cache_folder_without_a_cache_is_refused(tmp_path):
    spec = shards_in(tmp_path / "s", cache_folder=str(tmp_path / "c"))
    with pytest.raises(
        DataError, match="has no effect on .npy shards without a cache; set its size, such as"
    ):
        load_data(spec)


def test_steps_read_ahead_wait_for_nothing(tmp_path):
    """A source twice as fast as the training keeps up with it, though a step alone would take half of its time."""
    batch = 20
    slow = ss.Link(bandwidth=batch * row_bytes() / 0.02, latency=0)
    source = load_data(shards_in(tmp_path / "s", slow=slow, window=2, prefetch=2)).train

    def waited_s() -> float:
        with Loader(source, GlobalSampler.of(source, batch, seed=0)) as loader:
            loader.batch(0)
            waited = 0.0
            for step in range(1, 9):
                time.sleep(0.05)
                started = time.perf_counter()
                loader.batch(step)
                waited += time.perf_counter() - started
        return waited

    assert any(waited_s() < 8 * 0.02 / 2 for _ in range(10))  # other work may take the processor meanwhile


def test_closing_gives_up_a_slow_fetch(tmp_path):
    spec = shards_in(tmp_path / "s", slow=ss.Link(bandwidth=SHARD / 60, latency=0), cache="1 MB",
                     cache_folder=str(tmp_path / "c"))  # fmt: skip
    source, before = load_data(spec).train, threads()
    loader = Loader(source, GlobalSampler.of(source, 18, seed=0))

    def read() -> None:
        with contextlib.suppress(
            CancelledError, RuntimeError
        ):  # given up, or the loader was closed meanwhile
            loader.batch(0)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    time.sleep(0.2)
    started = time.perf_counter()
    loader.close()
    reading.join(30)
    assert time.perf_counter() - started < 30  # the fetch would take a minute
    assert threads() <= before


def test_rows_far_apart_are_read_in_the_order_asked_for(tmp_path):
    source = load_data(shards_in(tmp_path / "s")).train
    indices = torch.tensor([350, 3, 3, 90, 200, 0])
    x, _ = source.batch(indices)
    alone = [source.batch(indices[place : place + 1])[0] for place in range(len(indices))]
    assert torch.equal(x, torch.cat(alone))


def test_headers_are_parsed_by_one_thread_at_a_time(tmp_path, monkeypatch):
    """Python 3.11 has one depth of its parser for all threads, and fails if two of them use it at once."""
    load, inside, most = np.load, [], []

    def watched(*args, **kwargs):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.005)
        try:
            return load(*args, **kwargs)
        finally:
            inside.pop()

    monkeypatch.setattr(np, "load", watched)
    epochs_of(shards_in(tmp_path / "s", window=4), epochs=1)
    epochs_of(shards_in(tmp_path / "t", cache="1 MB", cache_folder=str(tmp_path / "c"), window=4), epochs=1)
    assert max(most) == 1
