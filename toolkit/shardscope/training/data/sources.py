"""Sources of rows: every source has a length and returns the batch of any requested rows.

A source reads only the requested rows, so a rank reads only its own part of the data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate

from shardscope.errors import DataError
from shardscope.training.data.batches import Batch, as_pair, map_tensors, named_tensors

Array = npt.NDArray[Any]


@runtime_checkable
class DataSource(Protocol):
    """Rows of inputs and targets that can be read in any order."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def batch(self, indices: Tensor) -> Batch:
        """Inputs and targets of the rows at `indices` (int64), on the CPU; see `shardscope.training.data.batches`."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Rows for training, for validation and for the final test.

    Whatever chooses (pruning, tuning, populations, batch sweeps, a person watching the curve) sees the validation
    split; the test split is evaluated once, after the last step of a job.
    """

    train: DataSource
    test: DataSource
    validation: DataSource | None = None
    """None where nothing is held out for it: then nothing is evaluated before the end."""

    def with_validation(self) -> Dataset:
        """Return the data with a validation split, which is taken out of the test split where the data bring none.

        The training split stays whole, so that every loss, seed and checkpoint of a job means what it meant before
        there was a validation split. The rule needs no seed. Of rows, every second one from the first on goes to
        validation, so that sorted classes stay balanced. Of windows of one text, the first half does: neighbouring
        windows share their subject, and must not be divided between choosing and testing. A single row is left to
        the test.
        """
        if self.validation is not None or len(self.test) < 2:
            return self
        rows = torch.arange(len(self.test))
        middle = (len(rows) + 1) // 2
        is_text = isinstance(self.test, WindowSource)
        first, second = (rows[:middle], rows[middle:]) if is_text else (rows[::2], rows[1::2])
        return replace(self, validation=RowSource(self.test, first), test=RowSource(self.test, second))


@dataclass(frozen=True)
class ArraySource:
    """Rows of two arrays of equal length, which may be memory-mapped.

    Floats, including float64, become float32, and integers int64. Byte images, that is uint8 inputs of three
    or more dimensions, become float32 in [0, 1].
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
        """The rows at `indices`."""
        rows = indices.numpy()
        x = _as_tensor(self.x[rows])
        is_byte_image = self.x.dtype == np.uint8 and self.x.ndim >= 3
        return (x.float() / 255 if is_byte_image else x), _as_tensor(self.y[rows])


@dataclass(frozen=True)
class TensorSource:
    """Rows of inputs and targets, tensors or structures of tensors, all of one length; returned without conversion."""

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
        """The rows at `indices`."""
        x, y = map_tensors(lambda tensor: tensor[indices], (self.x, self.y))
        return x, y


@dataclass(frozen=True)
class WindowSource:
    """Adjacent windows of `seq` tokens, cut from one long row; the target of each token is the next one.

    Raises:
        DataError: The tokens are not one row of integers, or are too few for one window.
    """

    tokens: Array
    seq: int
    vocab: int | None = None
    """Vocabulary size; tokens at or above it raise an error; None accepts all."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            raise DataError(
                f"tokens have shape {self.tokens.shape} and type {self.tokens.dtype}; "
                "give one row of integers"
            )
        if len(self) == 0:
            raise DataError(
                f"{len(self.tokens)} tokens are too few for one window of seq={self.seq}; "
                f"give at least {self.seq + 1}"
            )

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq)

    def batch(self, indices: Tensor) -> Batch:
        """Tokens and their next tokens of the windows at `indices`, each `(N, seq)` int64.

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
                f"token {token} is outside the vocabulary{limit}; use a model whose vocab covers the data"
            )


@dataclass(frozen=True)
class ItemSource:
    """The items of a map-style `torch.utils.data.Dataset`, collated: pairs of input and target, or mappings."""

    items: TorchDataset[Any]

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]  # map-style data sets have a length

    def batch(self, indices: Tensor) -> Batch:
        """The items at `indices`, stacked.

        Raises:
            DataError: The items do not stack, or do not form a batch.
        """
        items = [self.items[index] for index in indices.tolist()]
        try:
            batch = default_collate(items)
        except (RuntimeError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise DataError(
                f"data gave items that do not stack ({reason}); give items of one structure and shape"
            ) from error
        return as_pair(batch)


@dataclass(frozen=True)
class RowSource:
    """A subset of the rows of another source."""

    source: DataSource
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> Batch:
        """The rows at `indices`, which index this subset."""
        return self.source.batch(self.rows[indices])


def hold_out(source: DataSource, *, every: int = 10) -> Dataset:
    """Hold out one of `every` rows for testing, so that no seed is needed and sorted classes stay balanced.

    Raises:
        DataError: There are too few rows to hold one out.
    """
    if len(source) < 2:
        raise DataError(f"data has {len(source)} rows; give at least 2, one to train on and one to test on")
    rows = torch.arange(len(source))
    every = min(every, len(source))
    is_test = rows % every == every - 1
    return Dataset(train=RowSource(source, rows[~is_test]), test=RowSource(source, rows[is_test]))


def _require_numbers(name: str, array: Array) -> None:
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise DataError(
            f"{name} has shape {array.shape} and type {array.dtype}; "
            "give an array of numbers with a row for each sample"
        )


def _as_tensor(rows: Array) -> Tensor:
    return torch.from_numpy(rows.astype(np.float32 if rows.dtype.kind == "f" else np.int64, copy=False))
