"""Finds the tensors in a module's inputs or output: in tuples, mappings, dataclasses and objects of any class."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from io import IOBase
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardscope.errors import SpecError

MAX_OBJECTS = 1_000_000
"""Maximum number of objects to search in one structure; searching this many takes about a second."""

_SCALARS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
_WITHOUT_TENSORS = (
    type, nn.Module, str, bytes, bytearray, memoryview, int, float, complex, Enum, np.ndarray, np.generic,
    FunctionType, BuiltinFunctionType, MethodType, ModuleType, logging.Logger, logging.LoggerAdapter,
    logging.Handler, threading.Thread, IOBase, PurePath, torch.Generator,
)  # fmt: skip


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor reachable through items and attributes, each once; modules are not searched.

    Raises:
        SpecError: The structure contains more than `MAX_OBJECTS` objects.
    """
    found: list[Tensor] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) in _SCALARS or id(one) in seen or isinstance(one, _WITHOUT_TENSORS):
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            found.append(one)
            continue
        if len(seen) > MAX_OBJECTS:
            raise SpecError(
                f"a {type(value).__name__} that a layer takes or returns contains more than {MAX_OBJECTS:,} objects, "
                "too many to search for tensors in every forward pass; pass a smaller object to the layer"
            )
        waiting.extend(reversed(_parts(one)))
    return found


def _parts(value: Any) -> list[Any]:
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inside = value
    cls: Any = type(value)
    parts = [part for part in inside if type(part) not in _SCALARS]
    parts.extend(getattr(value, "__dict__", {}).values())
    parts.extend(getattr(value, name) for name in _slots(cls) if hasattr(value, name))
    return parts


@lru_cache(maxsize=1024)
def _slots(cls: type) -> tuple[str, ...]:
    return tuple(name for base in cls.__mro__ for name in _names(getattr(base, "__slots__", ())))


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else slots
