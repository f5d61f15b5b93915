"""Copies functions together with the state that they keep between calls, which `copy.deepcopy` does not copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any


def copy_of_callable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function or callable object whose calls do not change the original's state.

    The values that a function closes over, and the global variables that it uses, are copied, except global functions,
    classes and modules.

    Raises:
        Exception: An object cannot be copied, such as a lock.
    """
    memo: dict[int, Any] = {}
    return _copied(function, memo)  # type: ignore[no-any-return]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, ModuleType):
        return value
    if isinstance(value, partial):
        keywords = {name: _copied(each, memo) for name, each in value.keywords.items()}
        return partial(_copied(value.func, memo), *(_copied(each, memo) for each in value.args), **keywords)
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    return memo[id(value)] if id(value) in memo else _copied_function(value, memo)


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    cells = [CellType() for _ in function.__closure__ or ()]
    named = function.__globals__.copy()
    found = FunctionType(
        function.__code__, named, function.__name__, function.__defaults__, tuple(cells) or None
    )
    memo[id(function)] = found  # before its cells, as a function may close over itself
    found.__kwdefaults__ = function.__kwdefaults__
    found.__dict__.update(function.__dict__)
    for new, old in zip(cells, function.__closure__ or (), strict=True):
        new.cell_contents = _copied(old.cell_contents, memo)
    for name in function.__code__.co_names:
        if name in named and not isinstance(named[name], FunctionType):
            named[name] = _copied(named[name], memo)
    return found
