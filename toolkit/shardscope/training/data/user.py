"""Data sets that a user's function returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from shardscope.errors import DataError
from shardscope.training.data.sources import Dataset, DataSource, ItemSource, TensorSource, hold_out
from shardscope.training.data.stream import StreamSource

_FORMS = (
    "tensors (x, y), where each may be a tuple or a mapping of tensors, a mapping of tensors with 'labels', "
    "a map-style torch Dataset, an IterableDataset for training, or an object with __len__ and batch(indices)"
)


def call_user(make_data: Callable[..., Any], *, seed: int) -> Dataset:
    """Call the user's function, with `seed` if it has that parameter, and open the data that it returns.

    The function may return:

    - one data set, of which every tenth row becomes a test row;
    - a pair (train, test);
    - three data sets (train, validation, test).

    The training data may be a stream, such as a PyTorch `IterableDataset` (see `StreamSource`); the other splits may
    not, because their rows are read in any order.

    A value that could be either one data set or a pair of them, such as ``((a, b), (c, d))``, is read as (train, test).
    Without a validation set, half of the test rows are used for validation (see `Dataset.with_validation`).

    Raises:
        DataError: The function returned none of these, or a data set without rows.
    """
    made = make_data(seed=seed) if _takes_seed(make_data) else make_data()
    if isinstance(made, Dataset):
        return made
    if _is_split(made):
        train, *validation, test = (_source(part, make_data) for part in made)
        _refuse_streams((*validation, test), make_data)
        return Dataset(train=train, test=test, validation=next(iter(validation), None))
    source = _source(made, make_data)
    _refuse_streams((source,), make_data)
    return hold_out(source)


def _refuse_streams(sources: Sequence[DataSource], make_data: Callable[..., Any]) -> None:
    """Reject a stream from which test rows would have to be read or held out.

    Raises:
        DataError: One of the sources is a stream.
    """
    if any(isinstance(source, StreamSource) for source in sources):
        raise DataError(
            f"data={_name(make_data)} returned a stream (IterableDataset) to test on, which has no length and no row "
            "numbers; return (train, test), where only train is a stream"
        )


def _is_split(made: object) -> TypeGuard[tuple[Any, ...]]:
    """Return whether the value consists of two or three data sets (splits), and is not one pair (inputs, targets)."""
    if not isinstance(made, tuple) or len(made) not in (2, 3) or isinstance(made[0], Tensor):
        return False
    return not all(map(_is_structure, made)) or all(_read(part) is not None for part in made)


def _is_structure(value: object) -> bool:
    """Return whether the value is a tensor, or consists only of tensors in tuples, lists and mappings."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_structure, value.values()))
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_structure, value))
    return isinstance(value, Tensor)


def _source(made: object, make_data: Callable[..., Any]) -> DataSource:
    source = _read(made)
    if source is None:
        raise DataError(
            f"data={_name(make_data)} returned {_describe(made)}; return {_FORMS}, or (train, test) or (train, "
            "validation, test)"
        )
    if len(source) == 0:
        raise DataError(f"data={_name(make_data)} returned a data set without rows; return at least one row")
    return source


def _read(made: object) -> DataSource | None:
    if isinstance(made, IterableDataset) or _is_stream(made):
        return StreamSource(made)
    if _has_items(made):  # before DataSource, as a Hugging Face Dataset has another method batch
        return ItemSource(made)
    match made:
        case DataSource():
            return made
        case {"labels": labels} if _is_structure(made):
            return TensorSource(made, labels)
        case (x, y) if isinstance(made, tuple) and _is_structure(made):
            return TensorSource(x, y)
    return None


def _has_items(made: object) -> TypeGuard[TorchDataset[Any]]:
    """Return whether the value is a map-style data set of PyTorch, or of Hugging Face, which is read the same way."""
    is_known = hasattr(made, "__getitems__") or (
        isinstance(made, TorchDataset) and not hasattr(made, "batch")
    )
    return hasattr(made, "__len__") and is_known


def _is_stream(made: object) -> TypeGuard[Iterable[Any]]:
    """Return whether the value can be iterated over repeatedly, such as a Hugging Face `IterableDataset`."""
    return hasattr(made, "__iter__") and not hasattr(made, "__len__") and not hasattr(made, "__next__")


def _takes_seed(function: Callable[..., Any]) -> bool:
    try:
        return "seed" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _describe(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return type(value).__name__


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
