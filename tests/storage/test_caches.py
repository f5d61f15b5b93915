"""All caches of a folder together: their limit, which of them go first, and that none in use is deleted."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardscope as ss
from shardscope.cli import main
from shardscope.errors import DataError, SpecError
from shardscope.storage.cache import ShardCache
from shardscope.storage.caches import caches_in, evict

ROWS = 1000
SIZE = ROWS * 8 + 128


def filled(root: Path, number: int, shards: int = 2, used_t: float | None = None) -> ShardCache:
    """A cache of some shards, in use until it is deleted."""
    cache = ShardCache(root / f"{number:016x}", 10 * SIZE, f"/data/set{number}", shards * SIZE)
    for shard in range(shards):
        cache.get(f"s{shard}", lambda file: np.save(file, np.arange(ROWS)))
    if used_t is not None:
        for path in cache.folder.iterdir():
            os.utime(path, (used_t, used_t))
    return cache


def sources(root: Path) -> list[str]:
    return [cache.source for cache in caches_in(root)]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDSCOPE_CACHE_LIMIT", f"{5 * SIZE} B")
    return tmp_path


def test_a_new_cache_takes_the_place_of_the_one_not_used_for_longest(root: Path) -> None:
    for number, used_t in ((1, 300.0), (2, 100.0)):
        del_me = filled(root, number, used_t=used_t)
        del del_me
    assert sources(root) == ["/data/set2", "/data/set1"]
    with pytest.warns(
        UserWarning, match=r"deleted the least recently used data cache, of /data/set2 \(16.3 kB\), because"
    ):
        kept = filled(root, 3)
    assert sources(root) == ["/data/set1", "/data/set3"]
    assert [cache.is_in_use for cache in caches_in(root)] == [False, True]
    assert not (root / f"{2:016x}").exists()
    assert len(kept) == 2


def test_a_cache_in_use_is_never_deleted_and_keeps_its_room(root: Path) -> None:
    first = filled(root, 1, shards=1, used_t=1.0)  # may grow to one shard
    second = ShardCache(root / f"{2:016x}", 3 * SIZE)  # empty, but may grow to three
    told = r"a cache of 16.3 kB does not fit beside the 32.5 kB of 2 caches in use within SHARDSCOPE_CACHE_LIMIT=40.6"
    with pytest.raises(DataError, match=told):
        filled(root, 3)
    assert [cache.is_in_use for cache in caches_in(root)][:2] == [True, True]
    assert len(first) == 1
    assert evict(root, 0) == []
    del second
    filled(root, 3)
    assert len(first) == 1


def test_a_cache_that_does_not_fit_deletes_no_other(root: Path) -> None:
    filled(root, 1)
    used = filled(root, 2)
    told = r"a cache of 32.5 kB does not fit beside the 16.3 kB of 1 cache in use"
    with pytest.raises(DataError, match=told):
        filled(root, 3, shards=4)
    assert sources(root) == ["/data/set1", "/data/set2"]
    assert not (root / f"{3:016x}").exists()
    assert len(used) == 2


def test_a_smaller_cache_of_the_same_data_frees_no_room_while_a_larger_one_is_in_use(root: Path) -> None:
    larger = filled(root, 1, shards=4)
    smaller = ShardCache(larger.folder, SIZE, "/data/set1")
    with pytest.raises(
        DataError, match=r"a cache of 16.3 kB does not fit beside the 32.5 kB of 1 cache in use"
    ):
        filled(root, 2)
    del larger, smaller
    again = ShardCache(root / f"{1:016x}", SIZE, "/data/set1")
    again.get("s9", lambda file: np.save(file, np.arange(ROWS)))  # leaves this shard only
    assert [cache.num_bytes for cache in caches_in(root)] == [SIZE]
    filled(root, 2)


def test_a_cache_stays_listed_while_its_shards_change(tmp_path: Path) -> None:
    """And two processes that look at a cache do not take each other for one that uses it."""
    used = [ShardCache(tmp_path / f"{1:016x}", 2 * SIZE, "/data/set1")]
    ended = threading.Event()

    def train() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            used[0].get(f"s{number % 20}", lambda file: np.save(file, np.arange(ROWS)))

    def look() -> None:
        while not ended.is_set():
            caches_in(tmp_path)

    def seen(other_work: Callable[[], None]) -> set[tuple[str, bool]]:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(other_work)
            until, found = time.monotonic() + 0.5, set[tuple[str, bool]]()
            while time.monotonic() < until:
                found |= {(each.source, each.is_in_use) for each in caches_in(tmp_path)} or {("", False)}
            ended.set()
            other.result(30)
            ended.clear()
        return found

    assert seen(train) == {("/data/set1", True)}
    used.clear()
    assert seen(look) == {("/data/set1", False)}


def _hold(folder: Path) -> None:
    cache = ShardCache(folder, SIZE)
    cache.get("s0", lambda file: np.save(file, np.arange(ROWS)))
    time.sleep(60)


def test_the_cache_of_a_killed_process_is_in_use_no_longer(tmp_path: Path) -> None:
    folder = tmp_path / f"{1:016x}"
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(folder,), daemon=True)
    process.start()
    deadline = time.monotonic() + 60
    while not list(folder.glob("*.npy")):
        assert process.is_alive(), "it ended early"
        assert time.monotonic() < deadline, "it wrote no shard"
        time.sleep(0.01)
    assert evict(tmp_path, 0) == []
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    assert [cache.folder for cache in evict(tmp_path, 0)] == [folder]
    assert not folder.exists()


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.npy").write_bytes(b"mine")
    folder = filled(tmp_path, 1).folder
    (folder / "mine.txt").write_text("mine")
    assert len(evict(tmp_path, 0)) == 1
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert (tmp_path / "notes" / "a.npy").exists()


def test_links_and_folders_that_no_cache_made_stay(tmp_path: Path) -> None:
    target = filled(tmp_path / "elsewhere", 1).folder
    (tmp_path / f"{1:016x}").symlink_to(target)
    alike = tmp_path / f"{2:016x}"
    alike.mkdir()
    (alike / "mine.npy").write_bytes(b"mine")
    assert caches_in(tmp_path) == evict(tmp_path, None) == []
    assert len(list(target.glob("*.npy"))) == 2
    assert (alike / "mine.npy").exists()


def test_what_a_killed_writer_left_counts_and_is_cleared(tmp_path: Path) -> None:
    folder = filled(tmp_path, 1, shards=0).folder
    filled(tmp_path, 2, shards=0)
    (folder / "s0.part").write_bytes(bytes(1000))
    assert sorted(cache.num_bytes for cache in caches_in(tmp_path)) == [0, 1000]
    assert len(evict(tmp_path, None)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["caches.lock"]


def test_a_limit_that_is_not_a_size_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCOPE_CACHE_LIMIT", "much")
    with pytest.raises(SpecError, match="SHARDSCOPE_CACHE_LIMIT='much'"):
        filled(root, 1)
    job = ss.Job(model="mlp", data=ss.Shards(str(root / "data"), cache="1 GB"))
    with pytest.raises(SpecError, match="SHARDSCOPE_CACHE_LIMIT='much'"):
        ss.launch(job, root=root / "runs")
    assert not (root / "runs").exists()


def test_the_command_lists_limits_and_clears(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*options: str) -> Any:
        assert main(["cache", "--folder", str(root), *options]) == 0
        return capsys.readouterr()

    filled(root, 1, used_t=100.0)
    used = filled(root, 2)
    table = said().out
    assert "/data/set1" in table
    assert "in use" in table
    assert f"2 caches in {root}: 32.5 kB of 40.6 kB (SHARDSCOPE_CACHE_LIMIT)" in table
    listed = json.loads(said("--json").out)
    assert [each["num_bytes"] for each in listed["caches"]] == [2 * SIZE, 2 * SIZE]
    assert said("--limit", "1 GB").err == ""
    assert "deleted: /data/set1 (16.3 kB)" in said("--limit", f"{3 * SIZE} B").err
    assert said("--clear").out.startswith("data")
    del used
    assert f"0 caches in {root}" in said("--clear").out
    assert main(["cache", "--clear", "--limit", "1 GB"]) == 2
    assert main(["cache", "--limit", "lots"]) == 2
    filled(root, 3)
    assert f"1 cache in {root}" in said().out
    capsys.readouterr()
    assert main(["cache", "--folder", str(root / "typo")]) == 2
    assert "typo' does not exist" in capsys.readouterr().err
    (root / "file").write_text("")
    for folder in (root / "file", root / "file" / "below"):
        assert main(["cache", "--folder", str(folder), "--clear"]) == 2
        assert f"{str(folder)!r} does not exist or is not a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_of_a_run_tell_which_cache_they_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit reaches the ranks with the environment."""
    monkeypatch.setenv("SHARDSCOPE_CACHE_LIMIT", "30 kB")
    rng = np.random.default_rng(0)
    for number in range(2):
        rows = rng.random((64, 64), dtype=np.float32), rng.integers(0, 10, 64)
        shards = ss.write_shards(root / f"set{number}", rows, shard_size="5 kB")
        data = shards.replace(cache="22 kB", cache_folder=str(root / "caches"), window=2)
        run = ss.launch(ss.Job(model="mlp", data=data, batch=16, steps=4), root=root / "runs").wait(60)
    assert [Path(source).name for source in sources(root / "caches")] == ["set1"]
    told = "".join(run.logs(rank) for rank in range(run.job.world_size))
    assert (
        told.count(f"deleted the least recently used data cache, of {root / 'set0'}") == 1
    )  # by the rank that opened its cache first
