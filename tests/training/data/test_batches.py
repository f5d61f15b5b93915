"""Batches of any structure: read, checked, split and handed to a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from shardscope.errors import DataError
from shardscope.training.data import call, load_data, num_rows, read_batch, split, tensors_of


class Pair(NamedTuple):
    left: Any
    right: Any


ROWS = torch.arange(20.0)
STRUCTURES = {
    "tensor": ROWS,
    "tuple": (ROWS, ROWS + 1),
    "named tuple": Pair(ROWS, ROWS + 1),
    "mapping": {"a": ROWS, "b": ROWS[:, None]},
    "nested": {"a": (ROWS, {"deep": ROWS}), "b": [ROWS]},
}


@pytest.mark.parametrize("inputs", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("targets", [ROWS, {"y": ROWS, "z": ROWS}], ids=["tensor", "mapping"])
def test_tensors_in_any_structure_are_one_data_set(inputs: Any, targets: Any) -> None:
    data = load_data(lambda: (inputs, targets))
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 1, 1)
    batch = read_batch(data.train, torch.tensor([3, 1]))
    assert all(tensor.flatten()[0] - tensor.flatten()[1] == 2 for tensor in tensors_of(batch))
    first, second = split(batch, 2)
    assert num_rows(first[0]) == num_rows(second[0]) == 1
    assert type(first[0]) is (dict if isinstance(inputs, dict) else type(inputs))


class Items(TorchDataset):
    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def test_a_mapping_with_labels_is_inputs_and_targets_at_once() -> None:
    rows = {"input_ids": ROWS.long(), "labels": ROWS.long()}
    items = Items(lambda index: {key: value[index] for key, value in rows.items()})
    for made in (rows, items):
        inputs, targets = read_batch(load_data(lambda made=made: made).train, torch.tensor([4]))
        assert sorted(inputs) == ["input_ids", "labels"]
        assert targets.tolist() == [4]


def test_two_such_mappings_are_train_and_test() -> None:
    rows = {"input_ids": ROWS.long(), "labels": ROWS.long()}
    assert len(load_data(lambda: (rows, rows)).test) == 10
    assert len(load_data(lambda: ((ROWS, ROWS), (ROWS, ROWS))).test) == 10


def test_the_structure_of_the_inputs_says_how_a_model_is_called() -> None:
    def model(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert call(model, ROWS) == ((ROWS,), {})
    assert call(model, [1, None]) == ((1, None), {})
    assert call(model, {"a": 1, "deep": {"b": 2}}) == ((), {"a": 1, "deep": {"b": 2}})


class Gives:
    """A source of the user's, whose batches are whatever `make` makes of the number of rows asked for."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 20

    def batch(self, indices: Any) -> Any:
        return self.make(len(indices))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n: (torch.ones(n - 1, 2), torch.ones(n - 1)), "returned 3 rows in inputs for 4 indices"),
        (lambda n: (torch.ones(n + 1, 2), torch.ones(n + 1)), "returned 5 rows in inputs for 4 indices"),
        (lambda n: (torch.ones(n, 2), torch.ones(n - 1)), "returned 3 rows in targets for 4 indices"),
        (lambda n: (torch.ones(n), torch.tensor(1.0)), "returned a single number in targets for 4 indices"),
        (
            lambda n: ({"a": torch.ones(n), "b": torch.ones(1)}, torch.ones(n)),
            r"1 rows in inputs\['b'\] for 4",
        ),
        (lambda n: (torch.ones(0, 2), torch.ones(0)), "returned no rows of inputs for 4 indices"),
        (lambda n: ((), torch.ones(n)), "returned no rows of inputs for 4 indices"),
        (lambda n: (torch.ones(n).numpy(), torch.ones(n)), "returned inputs of type ndarray; return tensors"),
        (
            lambda n: ({"text": ["a"] * n}, torch.ones(n)),
            r"returned inputs\['text'\]\[0\] of type str; return tensors",
        ),
        (
            lambda n: (torch.ones(n),) * 3,
            r"a batch that is a tuple of length 3; return a pair \(inputs, targets\)",
        ),
        (
            lambda n: {"a": torch.ones(n)},
            "mapping with 'a'; return a pair .* or a mapping with the key 'labels'",
        ),
        (torch.ones, "a batch that is a Tensor; return a pair"),
    ],
)
def test_what_is_no_batch_of_so_many_rows_is_refused(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_batch(Gives(make), torch.arange(4))


@pytest.mark.parametrize(
    "item",
    [
        lambda index: (torch.ones(index + 1), 0),
        lambda index: {"labels": 0} if index else {"labels": 0, "more": 1},
        lambda index: {"labels": 0, "more": 1} if index else {"labels": 0, "other": 1},
        lambda index: (None, 0),
        lambda index: (0, 0) if index else (0, 0, 0),
    ],
)
def test_items_of_several_shapes_are_refused(item: Any) -> None:
    with pytest.raises(
        DataError, match=r"cannot be stacked .*return items of equal structure and shape|return a pair"
    ):
        read_batch(load_data(lambda: Items(item)).train, torch.arange(3))


def test_what_fails_in_the_users_items_is_not_blamed_on_their_shape() -> None:
    def broken(index: int) -> Any:
        raise KeyError("image")

    with pytest.raises(KeyError, match="image"):
        read_batch(load_data(lambda: Items(broken)).train, torch.arange(3))


def test_none_and_booleans_stay_as_they_are() -> None:
    source = Gives(lambda n: ({"x": torch.ones(n), "mask": None, "return_dict": True}, None))
    first, _ = split(read_batch(source, torch.arange(4)), 2)
    assert (first[0]["mask"], first[0]["return_dict"], first[1]) == (None, True, None)
    assert len(TensorDataset(*tensors_of(first))) == 2


@pytest.mark.parametrize(
    ("layer", "inputs", "dtype"),
    [
        (nn.Linear(2, 2), torch.ones(2, 2).long(), "int64"),
        (nn.Linear(2, 2).double(), torch.ones(2, 2).bool(), "bool"),
        (nn.Conv2d(1, 1, 1), {"input": torch.ones(1, 1, 2, 2).byte()}, "uint8"),
        (nn.Embedding(2, 2), (torch.ones(2, 2),), "float32"),
        (nn.BatchNorm1d(2), torch.ones(2, 2).long(), "int64"),
        (nn.LSTM(2, 2), torch.ones(2, 2).long(), "int64"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_inputs_of_a_type_that_the_model_cannot_take_are_named(layer: Any, inputs: Any, dtype: str) -> None:
    with pytest.raises(
        DataError, match=f"the model does not accept inputs of torch.{dtype}: .*; convert the inputs"
    ):
        call(layer, inputs)


def test_an_error_inside_a_model_is_not_blamed_on_its_inputs() -> None:
    def model(x: Any) -> Any:
        return x @ torch.ones(2, 2).long()

    with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype"):
        call(model, torch.ones(2, 2))


def test_an_error_about_shapes_tells_the_shape_of_the_inputs():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        call(nn.Linear(10, 2), torch.zeros(4, 8))
    assert caught.value.__notes__ == ["the model's inputs have the shape (4, 8)"]
    with pytest.raises(ZeroDivisionError) as other:
        call(lambda _: 1 / 0, torch.zeros(4, 8))
    assert not hasattr(other.value, "__notes__")
