"""The cache of shards: one fetch for all who ask, a limit that holds, and nothing lost by a kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shardscope.errors import DataError
from shardscope.storage.cache import ShardCache

ROWS = 1000
SIZE = ROWS * 8 + 128


def fetched(number: int, log: Path | None = None, takes_s: float = 0.0):
    def make(file) -> None:
        if log is not None:
            with log.open("a") as told:
                told.write(f"{number}\n")
        time.sleep(takes_s)
        np.save(file, np.full(ROWS, number))

    return make


def in_cache(cache: ShardCache) -> list[str]:
    return sorted(path.stem for path in cache.folder.glob("*.npy"))


def test_a_shard_is_fetched_once_and_then_mapped(tmp_path):
    cache = ShardCache(tmp_path / "cache", 10 * SIZE)
    first = cache.get("a", fetched(1))
    again = ShardCache(tmp_path / "cache", 10 * SIZE).get("a", lambda _file: pytest.fail("fetched again"))
    assert (first.was_there, again.was_there) == (False, True)
    assert isinstance(again.rows, np.memmap)
    assert np.array_equal(first.rows, again.rows)
    assert np.array_equal(again.rows, np.full(ROWS, 1))
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_the_limit_holds_and_the_least_recently_used_shard_goes(tmp_path):
    cache = ShardCache(tmp_path / "cache", 3 * SIZE)
    kept = [cache.get(name, fetched(number)).rows for number, name in enumerate("abc")]
    cache.get("a", fetched(9))  # used again
    cache.get("d", fetched(3))
    assert in_cache(cache) == ["a", "c", "d"]
    assert np.array_equal(kept[1], np.full(ROWS, 1)), "whoever maps a deleted shard can go on reading"
    assert not cache.get("b", fetched(1)).was_there
    assert in_cache(cache) == ["a", "b", "d"]


def test_a_shard_larger_than_the_cache_is_refused(tmp_path):
    cache = ShardCache(tmp_path / "cache", SIZE / 2)
    with pytest.raises(
        DataError, match=r"cache=4.06 kB is smaller than a shard of 8.13 kB; use at least 16.3 kB"
    ):
        cache.get("a", fetched(1))
    assert in_cache(cache) == []
    assert not list(cache.folder.glob("*.part"))


def test_a_damaged_shard_is_fetched_again(tmp_path):
    cache = ShardCache(tmp_path / "cache", 10 * SIZE)
    cache.get("a", fetched(1))
    os.truncate(cache.folder / "a.npy", SIZE // 2)
    found = cache.get("a", fetched(1))
    assert not found.was_there
    assert np.array_equal(found.rows, np.full(ROWS, 1))


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(
        DataError, match="can be written by other users; set cache_folder to a directory that only"
    ):
        ShardCache(tmp_path / "open", SIZE)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    def make(file) -> None:
        file.write(b"begun")
        raise OSError(28, "No space left on device")

    cache = ShardCache(tmp_path / "cache", 10 * SIZE)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); free space there"):
        cache.get("a", make)
    assert list(cache.folder.glob("*.part")) == []


def _get(folder: Path, log: Path, takes_s: float) -> None:
    cache = ShardCache(folder, 100 * SIZE)
    for number in range(6):
        rows = cache.get(f"s{number}", fetched(number, log, takes_s)).rows
        assert np.array_equal(rows, np.full(ROWS, number))


def test_ranks_and_their_threads_fetch_each_shard_once(tmp_path):
    log, processes = tmp_path / "log", multiprocessing.get_context("fork")
    started = [
        processes.Process(target=_get, args=(tmp_path / "cache", log, 0.02), daemon=True) for _ in range(3)
    ]
    for process in started:
        process.start()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: _get(tmp_path / "cache", log, 0.02), range(3)))
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert sorted(log.read_text().split()) == [str(number) for number in range(6)]


def test_a_killed_fetch_is_repeated_and_holds_up_nobody(tmp_path):
    log, processes = tmp_path / "log", multiprocessing.get_context("fork")
    killed = processes.Process(target=_get, args=(tmp_path / "cache", log, 60.0), daemon=True)
    killed.start()
    while not log.exists() or not log.read_text():
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(30)
    _get(tmp_path / "cache", log, 0.0)
    assert log.read_text().split() == ["0", "0", "1", "2", "3", "4", "5"]
    assert list((tmp_path / "cache").glob("*.part")) == []


def _churn(folder: Path, seed: int) -> None:
    cache, source = ShardCache(folder, 4 * SIZE), np.random.default_rng(seed)
    for number in source.integers(0, 10, 60).tolist():
        assert np.array_equal(cache.get(f"s{number}", fetched(number)).rows, np.full(ROWS, number))


def test_ranks_that_push_out_each_others_shards_read_the_right_rows(tmp_path):
    processes = multiprocessing.get_context("fork")
    started = [
        processes.Process(target=_churn, args=(tmp_path / "cache", seed), daemon=True) for seed in range(3)
    ]
    for process in started:
        process.start()
    most = 0
    while any(process.is_alive() for process in started):
        most = max(most, len(in_cache(ShardCache(tmp_path / "cache", 4 * SIZE))))
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert 0 < most <= 4
