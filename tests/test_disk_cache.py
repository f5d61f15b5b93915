"""The cache: private, atomic, never in the way."""

from __future__ import annotations

import multiprocessing
import os
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from shardscope.disk_cache import cache_dir, cached, cached_array
from shardscope.errors import DataError
from shardscope.training.data import load_data


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "cache"
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(path))
    return path


def names(folder):
    return [path.name for path in folder.iterdir()]


def fail():
    raise AssertionError("made again")


def test_an_array_is_made_once_and_memory_mapped():
    made = cached_array("a", lambda: np.arange(5))
    again = cached_array("a", fail)
    assert isinstance(again, np.memmap)
    assert not again.flags.writeable
    assert made.tolist() == again.tolist() == [0, 1, 2, 3, 4]


def test_only_the_user_can_look_inside(folder):
    cached_array("a", lambda: np.arange(5))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "a.npy").stat().st_mode) == 0o600
    assert names(folder) == ["a.npy"]


def test_without_a_setting_the_home_folder_is_used(monkeypatch, tmp_path):
    monkeypatch.delenv("SHARDSCOPE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "shardscope"


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY\x01\x00", b"not numpy at all"])
def test_a_damaged_file_is_made_again(folder, damage):
    cached_array("a", lambda: np.arange(5))
    (folder / "a.npy").write_bytes(damage)
    assert cached_array("a", lambda: np.arange(3)).tolist() == [0, 1, 2]
    assert cached_array("a", fail).tolist() == [0, 1, 2]


def test_a_pickle_in_the_cache_is_not_read(folder):
    cached_array("a", lambda: np.arange(5))
    np.save(folder / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert cached_array("a", lambda: np.arange(3)).tolist() == [0, 1, 2]


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(folder):
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    assert cached_array("a", lambda: np.arange(3)).tolist() == [0, 1, 2]


def test_a_cache_of_another_user_is_not_trusted(folder, monkeypatch):
    folder.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(DataError, match="can be written by other users; set SHARDSCOPE_CACHE"):
        cached_array("a", lambda: np.arange(3))


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_cache_that_others_may_write_is_not_trusted(folder, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(DataError, match="can be written by other users; set SHARDSCOPE_CACHE"):
        cached_array("a", lambda: np.arange(3))


def test_a_failed_write_leaves_nothing_behind(folder, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", full)
    assert cached_array("a", lambda: np.arange(3)).tolist() == [0, 1, 2]
    assert names(folder) == []


def _one_rank(barrier, results):
    barrier.wait()
    results.put(cached_array("shared", lambda: np.arange(200_000)).sum().item())


def test_several_ranks_may_fill_it_at_once(folder):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.SimpleQueue()
    ranks = [context.Process(target=_one_rank, args=(barrier, results)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    sums = [results.get() for _ in ranks]
    for rank in ranks:
        rank.join(30)
    assert sums == [sum(range(200_000))] * 4
    assert names(folder) == ["shared.npy"]


def test_only_the_newest_files_of_a_kind_are_kept(folder):
    cached_array("a", lambda: np.arange(5))
    for number in range(6):
        cached(f"trace-{number}.txt", str, read=Path.read_text, write=lambda file, _: file.write(b""), keep=3)
        os.utime(folder / f"trace-{number}.txt", (number, number))
    assert sorted(names(folder)) == ["a.npy", "trace-3.txt", "trace-4.txt", "trace-5.txt"]


@pytest.mark.parametrize("name", ["digits", "python-source"])
def test_a_warm_cache_opens_within_twenty_milliseconds(name):
    load_data(name)

    start = time.process_time()  # other work takes no part in it
    for _ in range(5):
        load_data(name)
    assert time.process_time() - start < 5 * 0.020
