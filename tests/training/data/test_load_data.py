"""Data from names, files and functions."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from shardscope.errors import DataError, SpecError
from shardscope.training.data import Dataset, DataSource, load_data


def everything(source: DataSource):
    return source.batch(torch.arange(len(source)))


def held_out(dataset: Dataset):
    """The rows for validation, then those for the test."""
    (x, y), (x_test, y_test) = everything(dataset.validation), everything(dataset.test)
    return torch.cat([x, x_test]), torch.cat([y, y_test])


def test_the_digits_are_all_there_and_split_by_class():
    dataset = load_data("digits")
    (x, y), (_, y_test) = everything(dataset.train), held_out(dataset)
    assert (len(x), len(dataset.validation), len(dataset.test)) == (1442, 178, 177)
    assert x.shape[1:] == (1, 8, 8)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert (x.min(), x.max()) == (0, 1)
    assert (y_test.bincount() / torch.cat([y, y_test]).bincount()).tolist() == pytest.approx(
        [0.2] * 10, abs=0.01
    )


def test_the_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    dataset, reference = load_data("digits"), load_digits()
    x = torch.cat([everything(dataset.train)[0], held_out(dataset)[0]]).flatten(1) * 16
    assert sorted(x.long().tolist()) == sorted(reference.data.astype(int).tolist())


@pytest.mark.slow
def test_scikit_learn_is_not_imported():
    code = (
        "import sys; from shardscope.training.data import load_data; load_data('digits');"
        "assert not {'sklearn', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_missing_scikit_learn_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr("shardscope.training.data.digits.find_spec", lambda name: None)
    with pytest.raises(DataError, match="not installed; run pip install scikit-learn"):
        load_data("digits")


def test_python_source_is_over_ten_megabytes_of_python():
    dataset = load_data("python-source", seq=128)
    num_held_out = len(dataset.validation) + len(dataset.test)
    assert (len(dataset.train) + num_held_out) * 128 > 10e6
    assert num_held_out / len(dataset.train) == pytest.approx(0.05 / 0.95, rel=0.01)
    x, _ = dataset.train.batch(torch.arange(400))
    text = bytes(x.flatten().tolist()).decode()
    assert text.startswith('"""Record of phased-in incompatible language changes.')
    assert "\ndef " in text


def test_the_target_of_a_token_is_the_next_one():
    x, y = load_data("python-source", seq=16).train.batch(torch.tensor([3, 4]))
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert y[0, -1] == x[1, 0]


@pytest.mark.slow
def test_python_source_is_the_same_in_every_process(monkeypatch, tmp_path):
    code = (
        "import hashlib; from shardscope.training.data import load_data; "
        "print(hashlib.sha256(load_data('python-source').train.tokens.tobytes()).hexdigest())"
    )
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path))
    other = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=200, capture_output=True, text=True
    )
    here = hashlib.sha256(load_data("python-source").train.tokens.tobytes()).hexdigest()
    assert other.stdout.strip() == here


@pytest.mark.parametrize("suffix", [".txt", ".npy", ".bin"])
def test_a_file_of_tokens_is_read_in_windows(tmp_path, suffix):
    path, tokens = tmp_path / f"data{suffix}", np.arange(1000) % 251
    if suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.astype("<u2" if suffix == ".bin" else np.uint8).tofile(path)
    dataset = load_data(str(path), seq=10)
    x, y = dataset.train.batch(torch.tensor([0, 30]))
    assert x.tolist() == [tokens[:10].tolist(), tokens[300:310].tolist()]
    assert y.tolist() == [tokens[1:11].tolist(), tokens[301:311].tolist()]
    held_out = [x.flatten().tolist() for x, _ in map(everything, (dataset.validation, dataset.test))]
    assert held_out == [tokens[950:970].tolist(), tokens[970:990].tolist()]  # two neighbouring windows each


def test_arrays_keep_every_tenth_row_for_testing(tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.arange(40.0).reshape(20, 2), y=np.arange(20))
    dataset = load_data(tmp_path / "rows.npz")
    x, y = held_out(dataset)
    assert y.tolist() == [9, 19]
    assert x.tolist() == [[18, 19], [38, 39]]
    assert x.dtype == torch.float32
    assert len(dataset.train) == 18
    assert not {9, 19} & set(everything(dataset.train)[1].tolist())


def test_arrays_may_bring_their_own_test_rows(tmp_path):
    np.savez(
        tmp_path / "rows.npz", x=np.zeros((4, 2)), y=np.zeros(4), x_test=np.ones((2, 2)), y_test=np.ones(2)
    )
    dataset = load_data(tmp_path / "rows.npz")
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (4, 1, 1)
    validation = {"x_validation": np.ones((3, 2)), "y_validation": np.ones(3)}
    npz(tmp_path / "rows.npz", x=np.zeros((40, 2)), y=np.zeros(40), **validation)
    dataset = load_data(tmp_path / "rows.npz")
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (36, 3, 4)


def test_images_of_bytes_come_out_between_zero_and_one(tmp_path):
    np.savez(
        tmp_path / "rows.npz", x=np.full((10, 3, 3), 255, dtype=np.uint8), y=np.zeros(10, dtype=np.uint8)
    )
    x, y = everything(load_data(tmp_path / "rows.npz").train)
    assert (x == 1).all()
    assert y.dtype == torch.int64


def npz(path, **arrays):
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("missing.txt", None, "does not exist; give the path of"),
        ("empty.txt", lambda p: p.touch(), "is empty"),
        ("folder.txt", lambda p: p.mkdir(), "does not have any shards; give a folder of .npy"),
        (
            "short.txt",
            lambda p: p.write_text("too short"),
            "9 tokens are too few to train and test with seq=64",
        ),
        (
            "flat.npy",
            lambda p: np.save(p, np.zeros((300, 2), int)),
            r"shape \(.*, 2\) .*; give a one-dimensional array of integers",
        ),
        (
            "real.npy",
            lambda p: np.save(p, np.zeros(300)),
            "type float64; give a one-dimensional array of integers",
        ),
        ("torn.npy", lambda p: p.write_bytes(b"\x93NUMPY\x01"), "cannot be read as .npy"),
        ("odd.bin", lambda p: p.write_bytes(b"abc"), "cannot be read as .bin"),
        ("torn.npz", lambda p: p.write_bytes(b"PK\x03\x04"), "cannot be read as .npz"),
        ("names.npz", lambda p: npz(p, images=[1]), "the file has images; save it with np.savez"),
        ("length.npz", lambda p: npz(p, x=np.zeros((3, 2)), y=[1]), "x has 3 rows but y has 1"),
        ("words.npz", lambda p: npz(p, x=["a"], y=[1]), "x has shape .* give an array of numbers"),
        ("one.npz", lambda p: npz(p, x=[1], y=[1]), "data has 1 rows; give at least 2"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_a_sentence(tmp_path, name, write, message):
    path = tmp_path / name
    if write:
        write(path)
    with pytest.raises(DataError, match=message) as caught:
        load_data(str(path))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_nothing_is_ever_unpickled(tmp_path, suffix):
    path, bomb = tmp_path / f"bomb{suffix}", np.array([Bomb()] * 3, dtype=object)
    if suffix == ".npy":
        np.save(path, bomb, allow_pickle=True)
    else:
        np.savez(path, x=bomb, y=bomb)
    with pytest.raises(DataError, match="cannot be read"):
        load_data(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match="cannot be read"):
        load_data(path)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(1000))
    source = load_data(tmp_path / "tokens.npy", vocab=256).train
    source.batch(torch.tensor([0]))
    with pytest.raises(DataError, match="token 640 is outside the vocabulary of 256"):
        source.batch(torch.tensor([9]))


def test_an_unknown_name_is_refused():
    with pytest.raises(SpecError, match="did you mean 'digits'"):
        load_data("digit")


class Items(TorchDataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index


class OwnSource:
    def __len__(self):
        return 20

    def batch(self, indices):
        return indices[:, None].float().expand(-1, 2), indices


PAIR = (torch.arange(20.0)[:, None].expand(-1, 2), torch.arange(20))


@pytest.mark.parametrize(
    "made", [PAIR, TensorDataset(*PAIR), Items(), OwnSource()], ids=lambda m: type(m).__name__
)
def test_a_function_may_return_one_data_set_or_two(made):
    one, two = load_data(lambda: made), load_data(lambda: (made, made))
    three = load_data(lambda: (made, made, made))
    assert [(len(d.train), len(d.validation), len(d.test)) for d in (one, two, three)] == [
        (18, 1, 1), (20, 10, 10), (20, 20, 20),
    ]  # fmt: skip
    for dataset in (one, two, three):
        x, y = dataset.train.batch(torch.tensor([3, 1]))
        assert x.tolist() == [[3, 3], [1, 1]]
        assert y.tolist() == [3, 1]
    assert one.validation.batch(torch.tensor([0]))[1].tolist() == [9]
    assert one.test.batch(torch.tensor([0]))[1].tolist() == [19]


def test_half_of_the_test_rows_are_for_validation_whatever_their_order():
    sorted_by_class = torch.arange(12) // 4
    dataset = load_data(lambda: (PAIR, (torch.arange(12.0), sorted_by_class)))
    (x, y), (x_test, y_test) = everything(dataset.validation), everything(dataset.test)
    assert (x.tolist(), x_test.tolist()) == ([0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11])
    assert y.tolist() == y_test.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_single_test_row_is_left_to_the_test():
    dataset = load_data(lambda: (PAIR, (torch.zeros(1), torch.zeros(1))))
    assert (dataset.validation, len(dataset.test)) == (None, 1)


def test_a_function_is_given_the_seed_if_it_asks():
    dataset = load_data(lambda seed: (torch.full((4,), seed), torch.zeros(4)), seed=7)
    assert everything(dataset.train)[0].tolist() == [7, 7, 7]


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "returned NoneType; return tensors"),
        ((1, 2), "returned int; return tensors"),
        ([PAIR], "returned list of tuple; return tensors"),
        (Endless(), r"a stream \(IterableDataset\) to test on, .*; return \(train, test\)"),
        ((torch.zeros(3), torch.zeros(2)), "give one target for each input"),
        ((torch.zeros(0), torch.zeros(0)), "a data set without rows"),
        ((torch.tensor(1), torch.tensor(1)), "give one target for each input"),
    ],
    ids=["None", "numbers", "a list of pairs", "no length", "unlike lengths", "no rows", "no dimensions"],
)
def test_a_function_that_returns_something_else_is_refused(made, message):
    with pytest.raises(DataError, match=message):
        load_data(lambda: made)


def test_items_that_are_no_pairs_are_refused():
    with pytest.raises(DataError, match=r"return a pair \(inputs, targets\)"):
        load_data(lambda: TensorDataset(torch.zeros(20))).train.batch(torch.tensor([0]))
