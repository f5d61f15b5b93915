"""Data sources: each has a length, and returns the requested rows as a batch.

A row is one sample. A source reads only the requested rows, so each rank reads only its own part of the data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate

from shardscope.errors import DataError
from shardscope.storage.parts import num_windows
from shardscope.storage.rows import held_out_every
from shardscope.training.data.batches import Batch, as_pair, map_tensors, named_tensors

Array = npt.NDArray[Any]


@runtime_checkable
class DataSource(Protocol):
    """Protocol for data whose rows, each an input and its target, can be read in any order."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def batch(self, indices: Tensor) -> Batch:
        """Return the inputs and targets of the rows at `indices` (int64) as CPU tensors.

        See `shardscope.training.data.batches` for the permitted structures.
        """
        ...


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test rows of a data set.

    The validation split is for all choices during development: pruning, tuning, population-based training, sweeps over
    batch sizes, and decisions by a person who watches the loss curve. The test split is evaluated once, after a job's
    last step.
    """

    train: DataSource
    test: DataSource
    validation: DataSource | None = None
    """Validation rows; if None, nothing is evaluated before the last step."""

    def with_validation(self) -> Dataset:
        """Return this data set with a validation split; if it has none, half of its test split is used for validation.

        The training split is not changed, so that losses stay the same and checkpoints stay valid if a validation split
        is added. The division needs no seed. Of independent test rows, every second row is used for validation,
        starting with the first, so that sorted classes stay balanced. Of the test windows of a text, the first half is
        used for validation, because neighbouring windows are similar and must not be divided between validation and
        test. If there is only one test row, there is no validation split.
        """
        if self.validation is not None or len(self.test) < 2:
            return self
        rows = torch.arange(len(self.test))
        middle = (len(rows) + 1) // 2
        is_text = getattr(self.test, "is_text", False)
        first, second = (rows[:middle], rows[middle:]) if is_text else (rows[::2], rows[1::2])
        return replace(self, validation=RowSource(self.test, first), test=RowSource(self.test, second))


@dataclass(frozen=True)
class ArraySource:
    """Source that reads rows from two arrays of equal length, `x` (inputs) and `y` (targets).

    The arrays may be memory-mapped. Floats, including float64, are converted to float32, and integers to int64. Byte
    images, that is uint8 inputs with at least three dimensions, are converted to float32 in [0, 1].

    Raises:
        DataError: The arrays are not numeric or differ in length.
    """

    x: Array
    y: Array

    def __post_init__(self) -> None:
        _require_numbers("x", self.x)
        _require_numbers("y", self.y)
        if len(self.x) != len(self.y):
            raise DataError(
                f"x has {len(self.x)} rows but y has {len(self.y)}; give one target for each input"
            )

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: Tensor) -> Batch:
        """Return the inputs and targets of the rows at `indices`."""
        rows = indices.numpy()
        x = _as_tensor(self.x[rows])
        is_byte_image = self.x.dtype == np.uint8 and self.x.ndim >= 3
        return (x.float() / 255 if is_byte_image else x), _as_tensor(self.y[rows])


@dataclass(frozen=True)
class TensorSource:
    """Source that reads rows from tensors, or structures of tensors: `x` (inputs) and `y` (targets).

    All tensors must have the same length. Rows are returned without conversion of their dtype.

    Raises:
        DataError: The tensors differ in length.
    """

    x: Any
    y: Any

    def __post_init__(self) -> None:
        named = [*named_tensors(self.x, "x"), *named_tensors(self.y, "y")]
        if len({tensor.shape[:1] for _, tensor in named}) != 1 or named[0][1].dim() == 0:
            shapes = " and ".join(str(tuple(tensor.shape)) for _, tensor in named) or "()"
            raise DataError(
                f"{' and '.join(name for name, _ in named)} have shapes {shapes}; "
                "give one target for each input, along the first dimension"
            )

    def __len__(self) -> int:
        return len(next(named_tensors(self.x, "x"))[1])

    def batch(self, indices: Tensor) -> Batch:
        """Return the inputs and targets of the rows at `indices`."""
        x, y = map_tensors(lambda tensor: tensor[indices], (self.x, self.y))
        return x, y


@dataclass(frozen=True)
class WindowSource:
    """Source whose rows are adjacent windows of `seq` tokens of a text; the target of each token is the next token.

    Raises:
        DataError: `tokens` is not a one-dimensional array of integers, or is too short for one window.
    """

    is_text: ClassVar = True

    tokens: Array
    seq: int
    vocab: int | None = None
    """Vocabulary size: reading a token that is not below it raises an error. None accepts all tokens."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            raise DataError(
                f"tokens have shape {self.tokens.shape} and type {self.tokens.dtype}; "
                "give a one-dimensional array of integers"
            )
        if len(self) == 0:
            raise DataError(
                f"{len(self.tokens)} tokens are too few for one window of seq={self.seq}; "
                f"give at least {self.seq + 1}"
            )

    def __len__(self) -> int:
        return num_windows(len(self.tokens), self.seq)

    def batch(self, indices: Tensor) -> Batch:
        """Return the tokens of the windows at `indices`, and the token that follows each; both are `(N, seq)` int64.

        Raises:
            DataError: A token is outside the vocabulary.
        """
        starts = indices.numpy() * self.seq
        windows = self.tokens[starts[:, None] + np.arange(self.seq + 1)].astype(np.int64)
        self._require_in_vocab(windows)
        tokens = torch.from_numpy(windows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _require_in_vocab(self, windows: Array) -> None:
        low, high = int(windows.min(initial=0)), int(windows.max(initial=0))
        if low < 0 or (self.vocab is not None and high >= self.vocab):
            token = low if low < 0 else high
            limit = "" if self.vocab is None else f" of {self.vocab}"
            raise DataError(
                f"token {token} is outside the vocabulary{limit}; use a model with a larger vocab, or different data"
            )


@dataclass(frozen=True)
class ItemSource:
    """Source that reads and collates the items of a map-style `torch.utils.data.Dataset`, or a Hugging Face `Dataset`.

    Each item is a pair of an input and a target, or a mapping with ``labels``. If the data set has a method
    ``__getitems__``, it reads all items of a batch together, as in PyTorch's `DataLoader`.
    """

    items: TorchDataset[Any]

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]  # map-style data sets have a length

    def batch(self, indices: Tensor) -> Batch:
        """Return the items at `indices`, stacked into a batch.

        Raises:
            DataError: The items cannot be stacked, or are neither pairs nor mappings with ``labels``.
        """
        wanted = indices.tolist()
        if hasattr(self.items, "__getitems__"):
            return collate(self.items.__getitems__(wanted))
        return collate([self.items[index] for index in wanted])


def collate(items: list[Any]) -> Batch:
    """Return the items, each a pair of an input and a target or a mapping with ``labels``, stacked into a batch.

    Raises:
        DataError: The items cannot be stacked, or are neither pairs nor mappings with ``labels``.
    """
    try:
        batch = default_collate(items)
    except (RuntimeError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"data returned items that cannot be stacked ({reason}); return items of equal structure and shape"
        ) from error
    return as_pair(batch)


@dataclass(frozen=True)
class RowSource:
    """Source that contains a subset of the rows of another source.

    Attributes:
        source: The source that contains the rows.
        rows: Indices in `source` of the rows of the subset (int64).
    """

    source: DataSource
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> Batch:
        """Return the inputs and targets of the rows at `indices`, counted within the subset."""
        return self.source.batch(self.rows[indices])


def hold_out(source: DataSource) -> Dataset:
    """Split `source` into training and test rows; every tenth row or, of fewer than ten rows, the last is a test row.

    This needs no seed, and keeps classes balanced if the rows are sorted by class.

    Raises:
        DataError: There are fewer than two rows.
    """
    if len(source) < 2:
        raise DataError(f"data has {len(source)} rows; give at least 2, one to train on and one to test on")
    rows = torch.arange(len(source))
    every = held_out_every(len(source))
    is_test = rows % every == every - 1
    return Dataset(train=RowSource(source, rows[~is_test]), test=RowSource(source, rows[is_test]))


def _require_numbers(name: str, array: Array) -> None:
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise DataError(
            f"{name} has shape {array.shape} and type {array.dtype}; "
            "give an array of numbers with one row for each sample"
        )


def _as_tensor(rows: Array) -> Tensor:
    return torch.from_numpy(rows.astype(np.float32 if rows.dtype.kind == "f" else np.int64, copy=False))
