"""Data sets that a user's function returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from shardscope.errors import DataError
from shardscope.training.data.sources import Dataset, DataSource, ItemSource, TensorSource, hold_out

_FORMS = (
    "tensors (x, y), where each may be a tuple or a mapping of tensors, a mapping of tensors with 'labels', "
    "a map-style torch Dataset or an object with __len__ and batch(indices)"
)


def call_user(make_data: Callable[..., Any], *, seed: int) -> Dataset:
    """Call the user's function, with `seed` if it has that parameter, and open the data that it returns.

    The function may return:

    - one data set, of which every tenth row becomes a test row;
    - a pair (train, test);
    - three data sets (train, validation, test).

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
        return Dataset(train=train, test=test, validation=next(iter(validation), None))
    return hold_out(_source(made, make_data))


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
    match made:
        case DataSource():
            return made
        case {"labels": labels} if _is_structure(made):
            return TensorSource(made, labels)
        case (x, y) if isinstance(made, tuple) and _is_structure(made):
            return TensorSource(x, y)
        case TorchDataset() if hasattr(made, "__len__") and not isinstance(made, IterableDataset):
            return ItemSource(made)
    return None


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
