"""Shards in formats that others write: tar files as for WebDataset, Parquet, and saved Hugging Face data sets."""

from __future__ import annotations

import builtins
import io
import tarfile

import numpy as np
import pytest
import torch

import shardscope as ss
from conformance.shards import numbered, numbers_of
from shardscope.errors import DataError
from shardscope.storage.formats import open_shards
from shardscope.training.data import load_data

X, Y = numbered(60)


def write_tar(path, rows, *, x=X, label=str, skip=(), order=None):
    """A tar file of samples; `order` sorts its members, and those in `skip` are left out."""
    members = []
    for row in rows:
        content = io.BytesIO()
        np.save(content, x[row])
        members += [
            (f"data/{row:06d}.x.npy", content.getvalue()),
            (f"data/{row:06d}.cls", label(Y[row]).encode()),
        ]
    if order is not None:
        members.sort(key=lambda member: order(member[0]))
    with tarfile.open(path, "w") as file:
        for name, raw in members:
            if name not in skip:
                info = tarfile.TarInfo(name)
                info.size = len(raw)
                file.addfile(info, io.BytesIO(raw))


def structured(rows, width=8):
    return np.ones(rows, dtype=[("x", "f4", (width,)), ("y", "i8")])


def damage(path):
    """A Parquet file with its footer, and noise for its first pages."""
    write_parquet(path, range(60))
    content = bytearray(path.read_bytes())
    content[10:300] = np.random.default_rng(0).bytes(290)
    path.write_bytes(content)


def write_parquet(path, rows, *, x=X, y=Y):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"x": list(x[rows]), "y": y[rows]}), path, row_group_size=7)


def write_arrow(path, rows):
    """As `Dataset.save_to_disk` does: the stream format, beside files of JSON."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": list(X[rows]), "y": Y[rows]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    (path.parent / "dataset_info.json").write_text("{}")


WRITE = {"tar": write_tar, "parquet": write_parquet, "arrow": write_arrow}


def folder_of(tmp_path, kind, shards=4):
    folder = tmp_path / kind
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(60), shards)):
        WRITE[kind](folder / f"part-{number}.{kind}", rows)
    return folder


def everything(dataset):
    parts = [
        part.batch(torch.arange(len(part))) for part in (dataset.train, dataset.validation, dataset.test)
    ]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


@pytest.mark.parametrize("kind", WRITE)
def test_every_row_is_read_once_with_its_target(tmp_path, kind):
    x, y = everything(load_data(str(folder_of(tmp_path, kind))))
    order = np.argsort(numbers_of(x))
    assert sorted(numbers_of(x)) == list(range(60))
    assert torch.equal(x[order], torch.from_numpy(X))
    assert torch.equal(y[order], torch.from_numpy(Y))


@pytest.mark.parametrize("kind", WRITE)
def test_one_file_is_a_folder_of_one(tmp_path, kind):
    folder = folder_of(tmp_path, kind, shards=1)
    x, _ = everything(load_data(str(folder / f"part-0.{kind}")))
    assert sorted(numbers_of(x)) == list(range(60))


@pytest.mark.parametrize("kind", WRITE)
def test_shards_are_unpacked_once_and_then_mapped_also_by_the_next_run(tmp_path, kind, monkeypatch):
    spec = ss.Shards(str(folder_of(tmp_path, kind)), cache="1 MB", cache_folder=str(tmp_path / "cache"))
    everything(load_data(spec))
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 4
    monkeypatch.setattr(f"shardscope.storage.{'tar.TarShards' if kind == 'tar' else 'tables.TableShards'}.read",
                        lambda *_: pytest.fail("unpacked again"))  # fmt: skip
    x, _ = everything(load_data(spec))
    assert sorted(numbers_of(x)) == list(range(60))


def test_test_rows_may_lie_in_a_folder_of_their_own(tmp_path):
    folder = folder_of(tmp_path, "tar")
    (tmp_path / "held").mkdir()
    write_tar(tmp_path / "held/t.tar", range(10))
    dataset = load_data(ss.Shards(str(folder), test=str(tmp_path / "held")))
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (60, 5, 5)


def test_shards_without_rows_are_left_out_before_some_are_held_out(tmp_path):
    for number in range(12):
        np.save(tmp_path / f"{number:02d}.npy", structured(0 if number == 9 else 20))
    dataset = load_data(str(tmp_path))
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (200, 10, 10)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_size_in_a_cache_is_stated_by_the_file(tmp_path, kind):
    """Whatever its compression: eight floats and an integer in each row."""
    shards = open_shards(ss.Shards(str(folder_of(tmp_path, kind))))
    for number, shard in enumerate(shards.shards):
        assert shards.read(number).nbytes == 15 * (8 * 4 + 8)
        assert shard.unpacked_bytes == shards.read(number).nbytes + 128, "the header"


def test_tokens_of_a_table_are_shifted_to_be_their_own_targets(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tokens = np.arange(20 * 5).reshape(20, 5)
    parquet.write_table(pa.table({"input_ids": list(tokens)}), tmp_path / "t.parquet")
    spec = ss.Shards(str(tmp_path / "t.parquet"), inputs="input_ids", targets="input_ids")
    x, y = load_data(spec).train.batch(torch.tensor([3]))
    assert x.tolist() == [[15, 16, 17, 18]]
    assert y.tolist() == [[16, 17, 18, 19]]


@pytest.mark.parametrize(
    ("write", "settings", "message"),
    [
        (lambda f: write_tar(f / "a.tar", range(9)), {"targets": "json"},
         r"a.tar does not have 'json', only x.npy, cls; choose with ss.Shards\(path, inputs=..., targets=...\)"),
        (lambda f: write_parquet(f / "a.parquet", range(9)), {"inputs": "pixels"},
         "a.parquet does not have 'pixels', only x, y; choose with"),
        (lambda f: (f / "a.parquet").write_bytes(b"PAR1 nothing"), {}, "a.parquet cannot be read as .parquet"),
        (lambda f: (f / "a.arrow").write_bytes(b"nothing"), {}, "a.arrow cannot be read as .arrow"),
        (lambda f: (f / "a.tar").write_bytes(b"nothing" * 200), {}, "a.tar cannot be read as an uncompressed tar"),
        (lambda f: (f / "a.npy").write_bytes(b"nothing"), {}, "a.npy cannot be read as .npy"),
        (lambda f: np.save(f / "a.npy", np.zeros((3, 2))), {}, r"has shape \(3, 2\) .* make them with ss.write_shards"),
        (lambda f: (f / "a.txt").touch(), {}, "does not have any shards; give a folder of .npy, .tar, .parquet or"),
        (lambda f: (f / "inner").mkdir(), {}, "or one of its folders inner"),
        (lambda f: [(f / "a.tar").touch(), (f / "b.npy").touch()], {}, r"in several formats \(npy, tar\); choose one"),
        (lambda f: write_tar(f / "a.tar", range(9), label=lambda _: "a cat"), {},
         "'data/000000.cls' of the sample 'data/000000' is not an array or a number"),
        (lambda f: write_parquet(f / "a.parquet", range(9), y=np.array([*"abcdefghi"])), {},
         "the targets have type .*; use numbers"),
        (lambda f: write_parquet(f / "a.parquet", slice(0, 2), x=np.array([[1.0], [1.0, 2.0]], dtype=object)), {},
         "the lists in the column 'x' have from 1 to 2 items; crop or pad them to one length"),
        (lambda f: write_parquet(f / "a.parquet", slice(0, 2), x=np.array([[1, None], [3, 4]], dtype=object)), {},
         "the column 'x' has 1 missing value; remove these rows"),
        (lambda f: write_parquet(f / "a.parquet", slice(0, 2), x=np.array([[1, 2], None], dtype=object)), {},
         "the column 'x' has 1 missing value; remove these rows"),
        (lambda f: damage(f / "a.parquet"), {}, "a.parquet cannot be read as .parquet: .*; write the file again"),
        (lambda f: write_tar(f / "a.tar", range(9), skip=["data/000004.cls", "data/000006.x.npy"]), {},
         "has 2 samples without inputs or targets; the first is 'data/000004', without 'cls'; add the member, or"),
        (lambda f: write_tar(f / "a.tar", range(9), order=lambda name: name.partition(".")[2]), {},
         "sample 'data/000000' are not adjacent; members of a sample must be adjacent"),
        (lambda f: [write_tar(f / f"{n}.tar", range(9), x=X if n else X[:, :3]) for n in range(3)], {},
         r"[012].tar has rows of type .*\([38],\).*, but .*[012].tar of type .*\([38],\).*; convert them"),
        (lambda f: [write_parquet(f / f"{n}.parquet", range(9), y=Y if n != 1 else Y / 2) for n in range(3)], {},
         "0.parquet has rows of type x: list<.*, y: int64, but .*1.parquet of type .*y: double"),
        (lambda f: [np.save(f / f"{n}.npy", structured(20, 7 if n == 1 else 8)) for n in range(3)], {},
         r"0.npy has rows of type .*\(8,\).*, but .*1.npy of type .*\(7,\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path, write, settings, message):
    write(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        everything(load_data(ss.Shards(str(tmp_path), **settings)))
    assert "\n" not in str(caught.value)


def test_a_missing_pyarrow_is_told(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    found = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pyarrow, which is not installed; run pip install pyarrow"):
        load_data(str(tmp_path))
