"""Shards that are cut, damaged or replaced: the file is named, or every row is what was written."""

from __future__ import annotations

import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import shardscope as ss
from conformance.shards import numbered, shards_in
from shardscope.errors import DataError
from shardscope.spec.shards import Shards
from shardscope.storage import reader
from shardscope.storage.formats import open_shards
from shardscope.training.data import load_data
from storage.test_formats import write_arrow, write_tar

ROWS = range(6)


def rows_of(folder: Path) -> list[np.ndarray]:
    found = open_shards(Shards(path=str(folder)))
    return [np.array(found.read(index)) for index in range(len(found.shards))]


def member_ends(path: Path) -> list[int]:
    """Where a cut leaves only complete members: at the start of each header."""
    with tarfile.open(path) as file:
        return [member.offset for member in file]


def test_a_tar_file_cut_anywhere_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, ROWS)
    whole = path.read_bytes()
    complete = member_ends(path)
    last = (
        len(whole.rstrip(b"\0")) // 512 * 512 + 512
    )  # only the block of zeros that ends the archive is missing
    for size in [*complete[1:], *(each + 700 for each in complete), last, last + 100]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.tar"):
            rows_of(tmp_path)
    path.write_bytes(whole[: last + 512])  # all samples and one of the two blocks
    assert len(rows_of(tmp_path)[0]) == len(ROWS)


@pytest.mark.parametrize("pad", [0, 512, 10240 * 3])
def test_a_tar_file_padded_with_zeros_is_whole_and_joined_ones_are_refused(tmp_path: Path, pad: int) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(pad))
    assert len(rows_of(tmp_path)[0]) == len(ROWS)
    path.write_bytes(whole + bytes(pad) + whole)
    with pytest.raises(DataError, match="has more data after the end of its archive"):
        rows_of(tmp_path)


def test_a_member_that_comes_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [*ROWS, ROWS[-1]])
    with pytest.raises(DataError, match=r"a\.tar' has the member '.*' twice in a row"):
        rows_of(tmp_path)


def test_a_header_damaged_in_the_middle_does_not_end_a_tar_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, ROWS)
    whole, places = path.read_bytes(), member_ends(path)
    for place in places:
        for offset in (0, 130, 150):
            content = bytearray(whole)
            content[place + offset] ^= 4
            path.write_bytes(content)
            with pytest.raises(DataError, match=r"a\.tar"):
                rows_of(tmp_path)
        path.write_bytes(whole[:place] + bytes(512) + whole[place + 512 :])
        with pytest.raises(DataError, match=r"a\.tar"):
            rows_of(tmp_path)


def test_a_stream_of_batches_may_end_without_a_mark_or_be_padded_but_not_be_cut_within_a_batch(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, np.arange(30))
    whole = path.read_bytes()
    for legal in (whole, whole[:-8], whole + bytes(8), whole + bytes(4096), whole + b"more"):
        path.write_bytes(legal)
        assert len(rows_of(tmp_path)[0]) == 30
    last = whole[:-8].rindex(b"\xff" * 4)
    for size in (0, 3, 100, last + 4, last + 20, len(whole) - 16, len(whole) - 4):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.arrow"):
            rows_of(tmp_path)


def test_an_npy_file_may_hold_more_than_its_array_but_not_less(tmp_path: Path) -> None:
    path, wanted = tmp_path / "a.npy", np.arange(100)
    np.save(path, wanted)
    whole = path.read_bytes()
    for more in (bytes(1), bytes(4096 - len(whole)), bytes(3 << 20), whole, whole + whole):
        path.write_bytes(whole + more)
        assert np.array_equal(rows_of(tmp_path)[0], wanted)
    for size in (len(whole) - 1, len(whole) - 8, 200):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.npy (is damaged|cannot be read)"):
            rows_of(tmp_path)
    with path.open("wb") as file:
        np.savez(file, a=wanted)
    with pytest.raises(DataError, match=r"a\.npy is an \.npz archive; save its array with np\.save"):
        rows_of(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["structured", "tokens"])
def test_flipped_bytes_in_a_header_are_refused_or_change_nothing(tmp_path: Path, kind: str) -> None:
    rows = np.ones(50, dtype=[("x", "<f4", (3,)), ("y", "<i8")])
    rows["y"] = np.arange(50)
    wanted = np.arange(500, dtype=np.uint16) if kind == "tokens" else rows
    path = tmp_path / "a.npy"
    np.save(path, wanted)
    whole, draw = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 3])):
            place = draw.randrange(whole.index(b"\n") + 1)
            bit, letter = content[place] ^ 1 << draw.randrange(8), ord(draw.choice("0123456789(),'<>|fiuO "))
            content[place] = draw.choice([bit, letter, draw.randrange(256)])
        path.write_bytes(content)
        try:
            (found,) = rows_of(tmp_path)
        except DataError as error:
            assert str(path) in str(error)
            assert "\n" not in str(error)
            refused += 1
        else:
            assert len(found) == len(wanted)
    assert refused > 200


@pytest.mark.filterwarnings("ignore")
def test_flipped_bytes_in_the_members_of_a_tar_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, ROWS)
    whole, draw = path.read_bytes(), random.Random(1)
    for _ in range(300):
        content = bytearray(whole)
        content[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            (found,) = rows_of(tmp_path)
        except DataError as error:
            assert "a.tar" in str(error)
            assert "\n" not in str(error)
        else:
            assert len(found) == len(ROWS)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("how", ["rename", "rewrite", "truncate", "copy of another", "append"])
def test_shards_replaced_while_in_use_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, cached: bool
) -> None:
    monkeypatch.setattr(reader, "_LOOK_EVERY_S", 0.0)
    settings = {"cache": "1 MB", "cache_folder": str(tmp_path / "cache")} if cached else {}
    spec = shards_in(tmp_path / "s", shards=2, window=2, **settings)
    other = tmp_path / "other"
    ss.write_shards(other, numbered(60, first=1000))
    source = load_data(spec).train
    source.batch(torch.arange(4))
    shard, new = tmp_path / "s/shard-000000.npy", next(other.glob("*.npy"))
    match how:
        case "rename":
            new.replace(shard)
        case "rewrite":
            shard.write_bytes(new.read_bytes())
        case "truncate":
            shard.write_bytes(shard.read_bytes()[:200])
        case "append":
            shard.write_bytes(shard.read_bytes() + b"\0" * 40)
        case _:
            shutil.copyfile(tmp_path / "s/shard-000001.npy", shard)
    with pytest.raises(DataError, match=r"shard-000000\.npy was written while it was in use"):
        source.batch(torch.arange(4))


def test_a_shard_that_is_deleted_while_open_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_LOOK_EVERY_S", 0.0)
    source = load_data(shards_in(tmp_path / "s", shards=2, window=2)).train
    before = source.batch(torch.arange(4))
    for shard in (tmp_path / "s").glob("*.npy"):
        shard.unlink()
    after = source.batch(torch.arange(4))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def moved(shard: Path) -> None:
    folder = shard.parent.rename(shard.parent.with_name("real"))
    shard.parent.symlink_to(folder)


def rewritten(shard: Path) -> None:
    """The same bytes in another file, as `rsync` and restored backups leave them."""
    shutil.copyfile(shard, shard.with_name("copy"))
    shard.with_name("copy").replace(shard)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        os.utime,
        lambda shard: os.utime(shard, ns=(0, shard.stat().st_mtime_ns // 10**9 * 10**9)),
        moved,
        rewritten,
    ],
    ids=["touched", "whole seconds", "moved", "rewritten"],
)
def test_a_shard_whose_content_is_as_before_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], cached: bool
) -> None:
    monkeypatch.setattr(reader, "_LOOK_EVERY_S", 0.0)
    settings = {"cache": "1 MB", "cache_folder": str(tmp_path / "cache")} if cached else {}
    source = load_data(shards_in(tmp_path / "s", shards=2, window=2, **settings)).train
    before = source.batch(torch.arange(4))
    change(tmp_path / "s/shard-000000.npy")
    after = source.batch(torch.arange(4))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    shard = tmp_path / "s/shard-000000.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match="was written while it was in use"):
        source.batch(torch.arange(4))


def looping(shard: Path) -> None:
    shard.unlink()
    shard.symlink_to(shard.name)


def replaced_by_a_file(shard: Path) -> None:
    shard.parent.rename(shard.parent.with_name("real"))
    shard.parent.write_text("")


@pytest.mark.parametrize("change", [looping, replaced_by_a_file])
def test_a_shard_that_can_no_longer_be_looked_at_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(reader, "_LOOK_EVERY_S", 0.0)
    source = load_data(shards_in(tmp_path / "s", shards=2, window=2)).train
    source.batch(torch.arange(4))
    change(tmp_path / "s/shard-000000.npy")
    with pytest.raises(DataError, match=r"shard-000000\.npy can no longer be read \("):
        source.batch(torch.arange(4))
